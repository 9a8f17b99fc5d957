/* Locks in Flower: the panels on the pages of tasks and workers, and what the Locks page (console.js)
   shares with them. All values are set as text. No HTML is built from strings. */
(function () {
  "use strict";

  var PERIOD = 1000; // ms from an answer to the next request
  var prefixField = document.getElementById("url_prefix");
  var prefix = prefixField && prefixField.value ? "/" + prefixField.value.replace(/^\/+|\/+$/g, "") : "";

  function el(tag, classes, text) {
    var node = document.createElement(tag);
    if (classes) node.className = classes;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function setText(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }

  // A name may contain right-to-left text, which must not change the order of the text around it.
  function name(text) {
    return el("bdi", "csl-name", text);
  }

  function duration(seconds) {
    if (seconds < 10) return seconds.toFixed(1) + " s";
    if (seconds < 120) return Math.round(seconds) + " s";
    if (seconds < 7200) return Math.floor(seconds / 60) + " min " + Math.round(seconds % 60) + " s";
    if (seconds < 172800) return Math.floor(seconds / 3600) + " h " + Math.floor(seconds % 3600 / 60) + " min";
    return Math.floor(seconds / 86400) + " d " + Math.floor(seconds % 86400 / 3600) + " h";
  }

  function taskLink(id, task) {
    var link = el("a", "", (task ? task.split(".").pop() : "task") + "[" + id.slice(0, 8) + "]");
    link.href = prefix + "/task/" + encodeURIComponent(id);
    link.title = id;
    link.dataset.task = id;
    link.dataset.key = "task " + id;
    return link;
  }

  function lockLink(lock) {
    var link = el("a");
    link.appendChild(name(lock.name));
    var search = lock.name.length < lock.length ? lock.name.slice(0, -1) : lock.name;
    link.href = prefix + "/locks?search=" + encodeURIComponent(search);
    return link;
  }

  var REASONS = {
    holder: "waits for its holder", pause: "waits for the end of a pause", redis: "waits for Redis",
    queue: "waits for others", worker: "waits for a worker", rate: "waits for its rate",
    group: "waits for its group", settling: "settles", following: "follows another task"
  };

  // Why a task does not run: the reason as a badge, and the sentence. Later reasons are shown as they are.
  function reasonNode(waitsFor, sentence) {
    var node = el("p", "csl-sentence");
    if (waitsFor) {
      node.appendChild(el("span", "csl-state csl-state-" + (/^(holder|queue|rate|group|settling|following)$/.test(waitsFor) ? "waiting" : "stuck"), REASONS[waitsFor] || "waits for " + waitsFor));
      node.appendChild(document.createTextNode(" "));
    }
    node.appendChild(el("span", "", sentence));
    return node;
  }

  function stateOf(holder) {
    if (!holder.silent_for) return holder.state;
    return "no sign of life for " + duration(holder.silent_for);
  }

  function holderNode(holder) {
    var node = el("div", "csl-holder");
    if (holder.task_id) node.appendChild(taskLink(holder.task_id, holder.task));
    else node.appendChild(name(holder.client || holder.token.slice(0, 8)));
    if (holder.worker) {
      node.appendChild(document.createTextNode(" on "));
      node.appendChild(name(holder.worker));
    }
    var state = holder.state && holder.state !== "running" ? stateOf(holder) + ", " : "";
    if (holder.silent_for) node.classList.add("csl-dead");
    node.appendChild(el("span", "csl-small",
      state + "for " + duration(holder.held_for) + ", lease " + duration(holder.left) + " left"));
    return node;
  }

  function holdersNode(lock) {
    var node = el("div");
    lock.holders.forEach(function (holder) { node.appendChild(holderNode(holder)); });
    if (lock.held > lock.holders.length) {
      node.appendChild(el("span", "csl-small", "and " + (lock.held - lock.holders.length) + " more"));
    }
    if (!lock.held) node.appendChild(el("span", "csl-small", lock.paused ? "paused" : "not held"));
    else if (lock.limit > 1 && lock.limit < 2147483647) node.appendChild(el("span", "csl-small", lock.held + " of " + lock.limit + " permits"));
    var groups = Array.isArray(lock.groups) ? lock.groups_waiting : lock.groups;  // of one lock, of a row
    if (groups) node.appendChild(el("span", "csl-small", groups + (groups === 1 ? " group waits" : " groups wait")));
    return node;
  }

  // Send a request, show the answer, and repeat. One request at a time; none while the page is hidden.
  function poll(address, show, fail) {
    var timer = null, latest = 0, stopped = false;
    function ask() {
      clearTimeout(timer);
      var request = ++latest;
      return fetch(address(), {credentials: "same-origin", headers: {Accept: "application/json"}})
        .then(function (response) {
          if (response.redirected || !/json/.test(response.headers.get("Content-Type") || "")) {
            throw new Error(response.status === 200 ? "You are logged out. Reload the page." :
              "Flower answers with status " + response.status + ".");
          }
          return response.json();
        })
        .then(function (answer) {
          if (request !== latest) return;
          if (answer.error) throw new Error(answer.error);
          show(answer);
        })
        .catch(function (error) {
          if (request === latest) fail(error.message || String(error));
        })
        .then(function () {
          if (request === latest && !stopped) timer = setTimeout(again, PERIOD);
        });
    }
    function again() {
      if (document.hidden) timer = setTimeout(again, PERIOD);
      else ask();
    }
    return {
      now: ask,
      go: function () { stopped = false; ask(); },
      stop: function () { stopped = true; clearTimeout(timer); }
    };
  }

  // -- Flower's own pages -----------------------------------------------------------------------

  function panel(after, title) {
    var node = el("section", "csl-panel");
    node.hidden = true;
    node.appendChild(el("h2", "", title));
    node.appendChild(el("div"));
    after.after(node);
    return node;
  }

  function taskPage(id, header) {
    var node = panel(header, "Lock"), badge = stateBadge();
    node.id = "csl-task";
    var ended = false;
    var polling = poll(function () {
      return prefix + "/locks/data?task=" + encodeURIComponent(id);
    }, function (answer) {
      node.hidden = !answer.lock;
      if (answer.lock) node.lastChild.replaceChildren(lockOfTask(answer.lock, id));
      else node.lastChild.replaceChildren();
      if (badge && answer.state) paint(badge, answer.state);
      if (!answer.lock && /^(SUCCESS|FAILURE|REVOKED)$/.test(answer.state)) {
        if (ended) polling.stop(); // seen twice: it will not change any more
        ended = true;
      }
    }, function (text) {
      node.hidden = false;
      node.lastChild.replaceChildren(el("p", "text-danger", text));
    });
    polling.now();
  }

  function lockOfTask(lock, id) {
    var node = el("div"), list = el("dl"), waits = lock.rank || !lock.holders.some(function (h) { return h.task_id === id; });
    function add(title, node) {
      list.appendChild(el("dt", "", title));
      list.appendChild(el("dd")).append(node);
    }
    if (lock.sentence) node.appendChild(reasonNode(lock.waits_for, lock.sentence));
    node.appendChild(list);
    add("Name", lockLink(lock));
    if (waits) {
      add("Held by", holdersNode(lock));
      add("Rank", lock.rank ? lock.rank + " of " + lock.waiting + (lock.rank === 1 ? " (next)" : "") :
        "not in the queue (" + lock.state + ")");
      add("Has waited", duration(lock.waited));
    } else {
      var own = lock.holders[0];
      add("State", own.state === "running" ? "held by this task" : stateOf(own));
      add("Held for", duration(own.held_for) + ", lease " + duration(own.left) + " left");
      add("Waiters", String(lock.waiting));
    }
    if (lock.call) {
      add("Unique", "calls like it are duplicates; " + lock.call.followers + (lock.call.followers === 1 ? " waits" : " wait") + " for its result");
    }
    return node;
  }

  function stateBadge() {
    var page = document.getElementById("task-page");
    return page && page.querySelector("dd .badge, td .badge");
  }

  function paint(badge, state) {
    setText(badge, state);
    badge.classList.toggle("csl-blocked", state === "BLOCKED");
    badge.classList.toggle("csl-delivered", state === "DELIVERED");
  }

  function workerPage(worker, header) {
    var node = panel(header, "Locks of this worker's tasks");
    node.id = "csl-worker";
    poll(function () {
      return prefix + "/locks/data?worker=" + encodeURIComponent(worker);
    }, function (answer) {
      var list = el("dl");
      answer.locks.forEach(function (lock) {
        list.appendChild(el("dt")).appendChild(lockLink(lock));
        var entry = list.appendChild(el("dd"));
        entry.appendChild(holdersNode(lock));
        if (lock.waiting) entry.appendChild(el("span", "csl-small", lock.waiting + " waiting"));
      });
      if (!answer.locks.length) list = el("p", "csl-small", "None.");
      node.lastChild.replaceChildren(list);
      node.hidden = false;
    }, function (text) {
      node.hidden = false;
      node.lastChild.replaceChildren(el("p", "text-danger", text));
    }).now();
  }

  // The list of tasks: one more filter, and badges in colour for the states BLOCKED and DELIVERED.
  function tasksPage(table) {
    // DataTables may have moved the head into a separate table.
    function column() {
      var head = table.tHead && table.tHead.rows.length ? table.tHead :
        document.querySelector(".dataTables_scrollHead thead");
      return head ? Array.from(head.rows[0].cells).findIndex(function (cell) {
        return cell.textContent.trim() === "State";
      }) : -1;
    }
    function paintAll() {
      var index = column();
      Array.from(table.tBodies[0].rows).forEach(function (row) {
        var cell = row.cells[index], badge = cell && cell.querySelector(".badge");
        var state = cell ? cell.textContent.trim() : "";
        if (cell && !badge && (state === "BLOCKED" || state === "DELIVERED")) {
          badge = el("span", "badge"); // an older Flower shows a state as plain text
          cell.replaceChildren(badge);
        }
        if (badge) paint(badge, state);
      });
    }
    new MutationObserver(paintAll).observe(table, {childList: true, subtree: true});
    paintAll();
    var filters = document.querySelector(".task-state-filters"), $ = window.jQuery;
    var bar = filters || table.parentNode.insertBefore(el("p"), table);
    var button = el("button", filters ? "task-state-filter" : "btn btn-outline-secondary btn-sm", "Blocked");
    button.type = "button";
    button.id = "csl-filter";
    button.dataset.taskState = "BLOCKED";
    button.setAttribute("aria-pressed", "false");
    bar.appendChild(button);
    function tables() { return $(table).DataTable(); }
    function mark() {
      var on = /(^|\s)state:BLOCKED(\s|$)/i.test(tables().search());
      button.classList.toggle("active", on);
      button.setAttribute("aria-pressed", String(on));
      if (on && filters) {
        filters.querySelectorAll('[data-task-state=""]').forEach(function (all) {
          all.classList.remove("active");
          all.setAttribute("aria-pressed", "false");
        });
      }
    }
    $(function () {
      button.addEventListener("click", function () {
        var on = button.getAttribute("aria-pressed") === "true";
        tables().search(on && !filters ? "" : "state:BLOCKED").draw();
        mark();
      });
      $(table).on("search.dt draw.dt", mark);
      document.querySelectorAll(".task-state-filter").forEach(function (each) {
        each.addEventListener("click", function () { setTimeout(mark); });
      });
    });
  }

  window.celerySingletonLock = {
    prefix: prefix, el: el, setText: setText, name: name, duration: duration, taskLink: taskLink,
    stateOf: stateOf, holdersNode: holdersNode, reasonNode: reasonNode, poll: poll
  };

  var task = document.getElementById("taskid"), worker = document.getElementById("workername");
  var tasks = document.getElementById("tasks-table");
  if (task) taskPage(task.textContent.trim(), task.closest("header, .page-header") || document.querySelector("#task-page > header") || task);
  if (worker) workerPage(worker.textContent.trim(), worker.closest("header") || worker.parentNode);
  if (tasks && window.jQuery) tasksPage(tasks);
})();
