// Strips of chunks: reading on hover, tap or focus; arrows within a strip and between strips; a jump to the passage.
"use strict";
for (const panel of document.querySelectorAll(".panel")) {
  const peek = panel.querySelector(".peek");
  const strips = [...panel.querySelectorAll(".strip")].map((strip) => [...strip.querySelectorAll(".chunk")]);
  let shown = null;
  peek.textContent = "This line shows the chunk under the pointer or the focus.";

  const target = (chunk) => document.getElementById(chunk.hash.slice(1));
  const show = (chunk) => {
    if (shown) target(shown).classList.remove("seen");
    shown = chunk;
    peek.classList.add("on");
    target(chunk).classList.add("seen");
    const name = document.getElementById(chunk.closest(".strip").getAttribute("aria-labelledby")).firstChild.textContent.trim();
    peek.textContent = `${name}, ${chunk.getAttribute("aria-label")}`;
  };
  const jump = (chunk) => {
    target(chunk).focus({ preventScroll: true });
    target(chunk).scrollIntoView({ block: "center" });
    show(chunk);
  };

  strips.forEach((chunks, row) => chunks.forEach((chunk, column) => {
    chunk.tabIndex = column === 0 ? 0 : -1;  // one stop of the Tab key a strip
    let touched = false;
    chunk.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") show(chunk); });
    chunk.addEventListener("focus", () => { if (!touched) show(chunk); });
    chunk.addEventListener("pointerdown", (event) => { touched = event.pointerType !== "mouse"; });
    chunk.addEventListener("click", (event) => {
      event.preventDefault();
      if (touched && shown !== chunk) show(chunk);
      else jump(chunk);
      touched = false;
    });
    chunk.addEventListener("keydown", (event) => {
      const to = {
        ArrowRight: [row, column + 1], ArrowLeft: [row, column - 1], Home: [row, 0], End: [row, chunks.length - 1],
        ArrowDown: [row + 1, column], ArrowUp: [row - 1, column],
      }[event.key];
      if (!to) return;
      event.preventDefault();
      const near = strips[to[0]];
      const next = near && near[Math.min(to[1], event.key.startsWith("Arrow") && to[0] !== row ? near.length - 1 : to[1])];
      if (!next) return;
      for (const other of near) other.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }));
}
