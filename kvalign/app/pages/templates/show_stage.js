(...settings) => {
  if (innerWidth <= 800) document.querySelector('#stage').scrollIntoView();
  return settings;
}
