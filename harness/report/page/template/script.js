"use strict";
// The memory timeline: the pointer, or the arrow keys, bring up the moment and the stack that changed it.
for (const figure of document.querySelectorAll("[data-memory]")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const field = figure.querySelector(".field");
  const cursor = figure.querySelector(".cursor");
  const head = figure.querySelector(".stack-head");
  const list = figure.querySelector("ol");
  let current = 0;

  const show = (index) => {
    current = Math.max(0, Math.min(data.points.length - 1, index));
    const [x, y, time, bytes, stack] = data.points[current];
    cursor.hidden = false;
    cursor.style.left = x + "%";
    cursor.style.setProperty("--height", y + "%");
    head.textContent = bytes + " after " + (time / 1000).toFixed(3) + " ms";
    const frames = stack === null ? [] : data.stacks[stack].map((frame) => data.frames[frame]);
    list.replaceChildren(...frames.map((text) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    }));
  };

  const nearest = (percent) => {
    let low = 0;
    let high = data.points.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (data.points[middle][0] <= percent) low = middle; else high = middle - 1;
    }
    return low;
  };

  field.tabIndex = 0;
  field.addEventListener("pointermove", (event) => {
    const box = field.getBoundingClientRect();
    show(nearest(100 * (event.clientX - box.left) / box.width));
  });
  field.addEventListener("keydown", (event) => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (step) { event.preventDefault(); show(current + step); }
  });
}
