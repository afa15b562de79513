// A frame is as high as its page. It is replaced whenever it changes; a load does not bubble.
element.addEventListener('load', ({ target: frame }) => {
  const page = frame.contentDocument.documentElement;
  new ResizeObserver(() => { frame.style.height = page.offsetHeight + 'px'; }).observe(page);
}, true);
