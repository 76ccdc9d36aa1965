"use strict";

// The curve of f, and the sentence beside it, follow the slider. Other rules have none.
const slider = document.getElementById("k");

function kName(log) {
  if (!Number.isInteger(log)) return String(Number((2 ** log).toPrecision(3)));
  return log < 0 ? `1/${2 ** -log}` : String(2 ** log);
}

function times(ratio) {
  return ratio >= 100 ? Math.round(ratio).toLocaleString("en") : String(Number(ratio.toPrecision(3)));
}

function set(name, text) {
  for (const place of document.querySelectorAll(`[data-value="${name}"]`)) place.textContent = text;
}

slider?.addEventListener("input", () => {
  const log = Number(slider.value);
  const k = 2 ** log;
  const points = Array.from({ length: 81 }, (_, step) => (step / 80) ** 4);
  const path = points.map((x) => `${x.toFixed(5)} ${(x ** k).toFixed(5)}`).join("L");
  document.getElementById("curve").setAttribute("d", "M" + path);
  for (const dot of document.querySelectorAll("[data-bias]")) {
    dot.setAttribute("cy", (Number(dot.dataset.bias) ** k).toFixed(4));
  }
  slider.setAttribute("aria-valuetext", `k = ${kName(log)}`);
  for (const place of document.querySelectorAll("[data-beside-1]")) place.hidden = log === 0;
  set("k", kName(log));
  set("ratio", times(9 ** k));
  set("easy", times(0.1 ** (k - 1)));
  set("hard", times(0.9 ** (k - 1)));
});

// What the pointer is over, said in a line beside it.
const tip = document.getElementById("tip");

document.addEventListener("pointerover", (event) => {
  const mark = event.target.closest("[data-say]");
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.say;
  const at = mark.getBoundingClientRect();
  const left = Math.min(at.left + at.width / 2 + 12, innerWidth - tip.offsetWidth - 8);
  const above = at.top - tip.offsetHeight - 8;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${(above > 8 ? above : at.bottom + 8) + scrollY}px`;
});
