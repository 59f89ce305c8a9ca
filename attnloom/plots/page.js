"use strict";
// Which cell of the block map the pointer is on, and which batch entry and head is shown.
(() => {
  const element = document.getElementById("map-data");
  if (!element) return;
  const map = JSON.parse(element.textContent);
  const images = [...document.querySelectorAll(".map img")];
  const output = document.getElementById("cell");
  const choice = document.getElementById("entry");
  const kinds = ["empty: never computed", "live in part", "partial: the mask_mod is asked",
                 "full: the mask_mod is not asked"];
  const idle = output.textContent;
  let shown = 0;

  const span = (cell, tiles, block, length) => {
    const first = cell * tiles * block;
    return `${first} .. ${Math.min((cell + 1) * tiles * block, length) - 1}`;
  };

  const describe = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const rows = map.cells[shown];
    const at = (position, size, count) =>
      Math.max(0, Math.min(count - 1, Math.floor(position / size * count)));
    const row = at(event.clientY - box.top, box.height, rows.length);
    const column = at(event.clientX - box.left, box.width, rows[0].length);
    const queries = span(row, map.tiles[0], map.block[0], map.lengths[0]);
    const keys = span(column, map.tiles[1], map.block[1], map.lengths[1]);
    output.textContent = `queries ${queries}, keys ${keys}: ${kinds[rows[row][column]]}`;
  };

  for (const image of images) {
    image.addEventListener("pointermove", describe);
    image.addEventListener("pointerleave", () => { output.textContent = idle; });
  }
  if (choice) {
    choice.addEventListener("change", () => {
      shown = Number(choice.value);
      images.forEach((image, place) => { image.hidden = place !== shown; });
      output.textContent = idle;
    });
  }
  document.documentElement.dataset.ready = String(images.length);
})();
