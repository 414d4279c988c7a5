"use strict";
// Puts the newest part of the page in place of the last; the server has escaped every text in it.
const main = document.querySelector("main");
const state = document.getElementById("state");
let last = "";
let good = Date.now();
let lost = "";

// The age goes on counting each second, also while an answer is awaited.
function tell() {
  state.textContent = lost && `not live: what you see is ${Math.round((Date.now() - good) / 1000)} s old (${lost})`;
  main.classList.toggle("stale", lost !== "");
}

async function part(address) {
  const answer = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(10000) });
  const text = await answer.text();
  if (!answer.ok) {
    const failure = new DOMParser().parseFromString(text, "text/html");
    throw new Error((failure.querySelector("p") ?? failure.body).textContent.trim());
  }
  return text;
}

// What a reader types into, has selected or points at stays until they have done.
const inUse = () => document.activeElement?.tagName === "INPUT" || !getSelection().isCollapsed || main.querySelector(".value:hover") !== null;

async function refresh(pause) {
  try {
    const text = document.hidden ? last : await part(location.pathname + (location.search ? location.search + "&part" : "?part"));
    if (text === last || !inUse()) {
      if (text !== last) {
        const focus = document.activeElement && document.activeElement.getAttribute("href");
        main.innerHTML = last = text;
        if (focus) main.querySelector(`a[href="${CSS.escape(focus)}"]`)?.focus({ preventScroll: true });
      }
      good = Date.now();
      lost = "";
    } else {
      lost = "it waits while you type, select text or point at a value";
    }
  } catch (error) {
    lost = error.name === "TimeoutError" ? "no answer within 10 s" : error.message;
  }
  tell();
  setTimeout(refresh, pause, pause);
}
setInterval(tell, 1000);
setTimeout(refresh, 1000 * main.dataset.interval, 1000 * main.dataset.interval);
