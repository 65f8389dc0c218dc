"use strict";
// On a wide screen, the notes of a source page stand beside the lines they explain, as high as the
// notes above them allow; on a narrow one (and without JavaScript) they follow their lines.
const WIDE = matchMedia("(min-width: 76.25em)"), GAP = 8;

function placeNotes(source) {
  const notes = [...source.querySelectorAll(".note")];
  source.classList.toggle("beside", WIDE.matches && notes.length > 0);
  source.style.minHeight = "";
  let free = 0;
  for (const note of notes) {
    note.style.top = "";
    if (!WIDE.matches) continue;
    const line = document.getElementById(`L${note.dataset.line}`);
    const top = Math.max(line.offsetTop, free);
    note.style.top = `${top}px`;
    free = top + note.offsetHeight + GAP;
  }
  if (WIDE.matches) source.style.minHeight = `${free}px`;
}

for (const source of document.querySelectorAll(".source")) {
  placeNotes(source);
  addEventListener("resize", () => placeNotes(source));
  for (const note of source.querySelectorAll(".note")) {
    const line = document.getElementById(`L${note.dataset.line}`);
    const light = on => () => [note, line].forEach(x => x.classList.toggle("lit", on));
    for (const element of [note, line]) {
      element.addEventListener("pointerenter", light(true));
      element.addEventListener("pointerleave", light(false));
    }
  }
}
