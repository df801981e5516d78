// The emergency stop and the camera: plain requests beside the page's web socket, plain elements
// outside its framework, so that both work while the page lags, and after it has lost its socket.
"use strict";
(() => {
  const element = (id) => document.getElementById(id);
  const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const STOP_FOR = 60000; // ms

  function request(path, options = {}, timeout = 2000) {
    return fetch(path, { cache: "no-store", signal: AbortSignal.timeout(timeout), ...options });
  }

  function say(text, state) {
    element("stop-result").textContent = text;
    element("stop-result").dataset.state = state;
  }

  // Emergency stop: nothing is asked first; tried until motion_guard confirms, for a minute.

  let stopping = false;

  async function stop() {
    if (stopping) return;
    stopping = true;
    say("STOPPING", "sent");
    const due = performance.now() + STOP_FOR;
    try {
      while (!(await sendStop()) && performance.now() < due) await pause(200);
    } finally {
      stopping = false;
    }
  }

  async function sendStop() {
    try {
      const options = { method: "POST", priority: "high", keepalive: true };
      const response = await request("/emergency_stop", options);
      if (response.status === 401) {
        say("NOT STOPPED: log in again", "failed");
        return false;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      const { confirmed, subscribers } = await response.json();
      if (confirmed) say("STOPPED", "done");
      else if (subscribers) say("SENT, NOT CONFIRMED by all guards and drivers", "failed");
      else say("NOT STOPPED: motion_guard is not there", "failed");
      return confirmed;
    } catch (error) {
      say("NOT STOPPED: no connection to the dashboard", "failed");
      return false;
    }
  }

  element("stop").addEventListener("click", stop);
  window.addEventListener(
    "keydown",
    (event) => {
      if (event.key === "Escape" && !event.repeat) stop();
    },
    true, // before anything on the page can keep the key to itself
  );

  // Reset: asks first.

  element("reset").addEventListener("click", () => element("confirm").showModal());
  element("reset-no").addEventListener("click", () => element("confirm").close());
  element("reset-yes").addEventListener("click", async () => {
    element("confirm").close();
    try {
      const response = await request("/reset_emergency_stop", { method: "POST" }, 5000);
      const { success, message } = await response.json();
      say(success ? "" : `not reset: ${message}`, success ? "" : "failed");
    } catch (error) {
      say("not reset: no connection to the dashboard", "failed");
    }
  });

  // What motion_guard says, twice a second.

  function show(state, text) {
    element("motion").dataset.state = state;
    element("motion").textContent = text;
  }

  async function watch() {
    for (;;) {
      try {
        const response = await request("/motion");
        if (response.status === 401) show("unknown", "logged out: load the page again");
        else if (!response.ok) show("unknown", `the dashboard failed: status ${response.status}`);
        else showMotion(await response.json());
      } catch (error) {
        show("unknown", "no connection to the dashboard");
      }
      await pause(500);
    }
  }

  const number = (value) => (value === null ? "?" : value.toFixed(2));

  function showMotion(motion) {
    element("reset").hidden = !motion.emergency_stop;
    if (!motion.known) show("unknown", "motion_guard was not heard yet");
    else if (motion.age > 1.5) show("unknown", `motion_guard is silent for ${motion.age.toFixed(0)} s`);
    else if (motion.emergency_stop) show("stopped", `EMERGENCY STOP: ${motion.text}`);
    else if (!motion.allowed) show("held", `no motion: ${motion.text}`);
    else {
      const speed = `${number(motion.linear)} m/s, ${number(motion.angular)} rad/s`;
      const limit = `limit ${number(motion.speed_limit)} m/s`;
      const warning = motion.text ? `; ${motion.text}` : "";
      show(warning ? "held" : "allowed", `motion allowed, ${speed} (${limit})${warning}`);
    }
    if (!motion.emergency_stop && element("stop-result").dataset.state === "done") say("", "");
  }

  // The camera: the next picture is asked for when the one before it is shown, so a slow connection
  // gets fewer pictures, not older ones.

  async function film() {
    let shown = 0;
    for (;;) {
      await pause(100);
      const image = element("camera");
      if (!image || document.hidden) continue;
      try {
        const response = await request(`/camera.jpg?after=${shown}`);
        if (response.status !== 200) continue;
        const url = URL.createObjectURL(await response.blob());
        image.src = url;
        await image.decode().catch(() => {});
        URL.revokeObjectURL(url);
        shown = Number(response.headers.get("x-frame"));
        image.dataset.frame = shown;
      } catch (error) {
        await pause(1000);
      }
    }
  }

  watch();
  film();
})();
