(...settings) => [...settings.slice(0, -2),
  ...['#cache_size', '#num_evicted'].map((name, i) => {
    const { min, max } = document.querySelector(`${name} input[type=range]`);
    return Math.min(Math.max(settings.at(i - 2), min), max);
  })]
