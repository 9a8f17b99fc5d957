/* Locks in Flower: the Locks page, and the panels on the pages of tasks and workers.
   All values are set as text. No HTML is built from strings. */
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
    return link;
  }

  function lockLink(lock) {
    var link = el("a");
    link.appendChild(name(lock.name));
    var search = lock.name.length < lock.length ? lock.name.slice(0, -1) : lock.name;
    link.href = prefix + "/locks?search=" + encodeURIComponent(search);
    return link;
  }

  function stateOf(holder) {
    if (!holder.silent_for) return holder.state;
    return "no sign of life for " + duration(holder.silent_for) + ", free in " + duration(holder.left) +
      " at the latest if it is dead";
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
    else if (lock.limit > 1) node.appendChild(el("span", "csl-small", lock.held + " of " + lock.limit + " permits"));
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

  // -- the Locks page ---------------------------------------------------------------------------

  function locksPage(root) {
    var rows = document.getElementById("csl-rows"), search = document.getElementById("csl-search");
    var order = document.getElementById("csl-order"), error = document.getElementById("csl-error");
    var live = document.getElementById("csl-live"), empty = document.getElementById("csl-empty");
    var back = document.getElementById("csl-back"), next = document.getElementById("csl-next");
    var known = new URLSearchParams(location.search), shown = new Map();
    var offset = parseInt(known.get("offset"), 10) || 0, opened = known.get("open") || "";
    search.value = known.get("search") || "";
    if (known.get("order")) order.value = known.get("order");
    if (order.selectedIndex < 0) order.value = "waiting";

    function query() {
      var asked = new URLSearchParams();
      if (search.value) asked.set("search", search.value);
      if (order.value !== "waiting") asked.set("order", order.value);
      if (offset) asked.set("offset", offset);
      if (opened) asked.set("open", opened);
      return asked;
    }

    var polling = poll(function () { return prefix + "/locks/data?" + query(); }, show, function (text) {
      error.hidden = false;
      setText(error, text);
      root.dataset.state = "error";
    });

    function changed() {
      var text = query().toString();
      history.replaceState(null, "", location.pathname + (text ? "?" + text : ""));
      polling.now();
    }

    function show(answer) {
      error.hidden = true;
      if (offset && offset >= answer.listed) {
        offset = 0;
        return changed();
      }
      var longest = Math.max.apply(null, answer.locks.map(function (lock) {
        return Math.max(lock.held_for, lock.oldest);
      }).concat(1));
      var wanted = new Set(answer.locks.map(function (lock) { return lock.id; }));
      shown.forEach(function (row, id) {
        if (!wanted.has(id)) {
          row.remove();
          shown.delete(id);
        }
      });
      var focus = document.activeElement, at = rows.firstElementChild;
      answer.locks.forEach(function (lock) {
        var row = shown.get(lock.id) || newRow(lock);
        fill(row, lock, longest);
        if (row === at) at = row.nextElementSibling;
        else rows.insertBefore(row, at);
        if (at && at.classList.contains("csl-more")) at = at.nextElementSibling;
      });
      details(answer.open);
      if (focus && focus !== document.activeElement && document.contains(focus)) focus.focus();
      summary(answer);
    }

    function summary(answer) {
      var first = answer.locks.length ? answer.offset + 1 : 0, last = answer.offset + answer.locks.length;
      var text = answer.total + (answer.total === 1 ? " lock" : " locks") + ", " + answer.waiting + " waiting";
      if (answer.listed < answer.total) text += "; only the first " + answer.listed + " are listed: use the filter to find others";
      if (answer.broken) text += "; " + answer.broken + " keys with names of locks hold other data";
      if (answer.age > 2) text += "; read " + duration(answer.age) + " ago";
      setText(document.getElementById("csl-summary"), text);
      setText(document.getElementById("csl-place"), first + "–" + last + " of " + answer.listed);
      back.disabled = answer.offset === 0;
      next.disabled = last >= answer.listed;
      back.onclick = function () { offset = Math.max(0, answer.offset - 50); changed(); };
      next.onclick = function () { offset = last; changed(); };
      empty.hidden = answer.locks.length > 0;
      setText(empty, search.value ? "No lock that is held or waited for matches the filter." :
        "No lock is held or waited for. A lock appears here when a task takes it.");
      root.dataset.state = "shown";
    }

    function newRow(lock) {
      var row = el("tr"), fold = el("button", "csl-fold");
      fold.type = "button";
      fold.appendChild(name(lock.name));
      fold.addEventListener("click", function () {
        opened = opened === lock.id ? "" : lock.id;
        changed();
      });
      row.appendChild(el("td")).appendChild(fold);
      ["td", "td", "td"].forEach(function (tag) { row.appendChild(el(tag)); });
      row.dataset.lock = lock.id;
      var bars = row.cells[3].appendChild(el("div", "csl-bars"));
      ["held", "waited"].forEach(function (kind) {
        bars.appendChild(el("span", "csl-track")).appendChild(el("span", "csl-bar csl-bar-" + kind));
        bars.appendChild(el("span"));
      });
      shown.set(lock.id, row);
      return row;
    }

    function fill(row, lock, longest) {
      var waiting = row.cells[2], bars = row.cells[3].firstChild.children;
      row.cells[0].firstChild.setAttribute("aria-expanded", String(opened === lock.id));
      replaceUnlessFocused(row.cells[1], holdersNode(lock));
      var text = lock.waiting + (lock.adrift ? " + " + lock.adrift + " whose queue no worker consumes" : "");
      setText(waiting, text + (lock.paused && lock.held ? " (paused)" : ""));
      [lock.held_for, lock.oldest].forEach(function (value, i) {
        bars[2 * i].firstChild.style.width = value ? Math.max(1, 100 * value / longest) + "%" : "0";
        setText(bars[2 * i + 1], (i ? "waited " : "held ") + duration(value));
      });
    }

    // Keeps the keyboard focus: a cell is not replaced while a link in it has the focus.
    function replaceUnlessFocused(cell, node) {
      if (!(document.activeElement && document.activeElement !== cell && cell.contains(document.activeElement))) {
        cell.replaceChildren(node);
      }
    }

    function details(lock) {
      var old = document.getElementById("csl-more"), row = lock && shown.get(lock.id);
      if (old && old.dataset.of !== (row ? lock.id : "")) old.remove();
      if (!row) return;
      var more = document.getElementById("csl-more");
      if (!more) {
        more = el("tr", "csl-more");
        more.id = "csl-more";
        more.dataset.of = lock.id;
        more.appendChild(el("td")).colSpan = 4;
      }
      if (row.nextElementSibling !== more) row.after(more);
      replaceUnlessFocused(more.cells[0], detailsNode(lock));
    }

    function detailsNode(lock) {
      var node = el("div");
      if (lock.length > 200) node.appendChild(el("div", "csl-full")).appendChild(name(lock.name));
      if (lock.paused) node.appendChild(el("p", "", "Paused: " + lock.paused));
      table(node, "Holders", ["Task", "Worker", "State", "Held for", "Lease left", "Fencing token", ""],
        lock.holders, function (holder) {
          var button = el("button", "btn btn-outline-danger btn-sm", "Release…");
          button.type = "button";
          button.addEventListener("click", function () { release(lock, holder); });
          return [holder.task_id ? taskLink(holder.task_id, holder.task) : name(holder.client),
            name(holder.worker), stateOf(holder), duration(holder.held_for), duration(holder.left),
            holder.fence, root.dataset.readOnly ? "" : button];
        });
      table(node, "Queue", ["Rank", "Task", "State", "Has waited", "Broker queue"],
        lock.queue, function (waiter) {
          return [waiter.rank ? String(waiter.rank) : "–",
            waiter.task_id ? taskLink(waiter.task_id, waiter.task) : "a client", waiter.state,
            duration(waiter.age), name(waiter.queue)];
        });
      var left = lock.waiting + lock.adrift - lock.queue.length;
      if (left > 0) node.appendChild(el("p", "csl-small", "and " + left + " more waiters"));
      return node;
    }

    function table(parent, title, heads, entries, cells) {
      if (!entries.length) return;
      var node = parent.appendChild(el("table")), head = node.createTHead().insertRow();
      node.createCaption().textContent = title;
      node.caption.style.captionSide = "top";
      heads.forEach(function (text) { head.appendChild(el("th", "", text)).scope = "col"; });
      var body = node.createTBody();
      entries.forEach(function (entry) {
        var row = body.insertRow();
        cells(entry).forEach(function (cell) { row.insertCell().append(cell); });
      });
    }

    // Two questions: what to do, then whether to accept the risk, which the server names.
    function release(lock, holder) {
      var dialog = document.getElementById("csl-dialog"), yes = document.getElementById("csl-dialog-yes");
      var title = document.getElementById("csl-dialog-title"), text = document.getElementById("csl-dialog-text");
      var end = document.getElementById("csl-dialog-end");
      var why = document.getElementById("csl-dialog-why"), reason = document.getElementById("csl-dialog-reason");
      setText(document.getElementById("csl-dialog-name"), lock.name);
      setText(title, "Take the lock from this holder?");
      setText(text, "The holder is " + (holder.task_id ? holder.task + "[" + holder.task_id + "]" : holder.client) +
        (holder.worker ? " on " + holder.worker : "") + ".");
      setText(yes, "Continue");
      why.value = "";
      reason.hidden = yes.hidden = yes.disabled = end.disabled = false;
      end.hidden = true;
      document.getElementById("csl-dialog-no").onclick = function () { dialog.close(); };
      yes.onclick = function () {
        send({sure: false}).then(function (answer) {
          if (!answer.risk) throw new Error("It does not hold the lock any more.");
          setText(title, "Are you sure?");
          setText(text, answer.risk + (holder.task_id ? " Or end the task: its worker stops it, its work is lost, " +
            "and the next waiter gets the lock when the task has ended." : ""));
          setText(yes, "Release");
          end.hidden = !holder.task_id;
          yes.onclick = function () { submit({sure: true}); };
          end.onclick = function () { submit({sure: true, terminate: true}); };
        }).catch(failed);
      };
      function failed(problem) {
        setText(title, "Not done");
        setText(text, problem.message || String(problem));
        yes.hidden = end.hidden = reason.hidden = true;
        polling.now();
      }
      function submit(what) {
        send(what).then(function () {
          dialog.close();
          polling.now();
        }).catch(failed);
      }
      function send(what) {
        yes.disabled = end.disabled = true;
        return fetch(prefix + "/api/locks/release", {
          method: "POST",
          credentials: "same-origin",
          headers: {"Content-Type": "application/json", "X-XSRFToken": root.dataset.token},
          body: JSON.stringify(Object.assign({id: lock.id, token: holder.token, why: why.value}, what))
        }).then(function (response) {
          return response.text().then(function (body) {
            var answer;
            yes.disabled = end.disabled = false;
            try {
              answer = JSON.parse(body);
            } catch (_) {
              answer = {error: body};
            }
            if (!response.ok) throw new Error(answer.error || "Flower answers with status " + response.status + ".");
            return answer;
          });
        });
      }
      dialog.showModal();
    }

    var typing = null;
    search.addEventListener("input", function () {
      clearTimeout(typing);
      typing = setTimeout(function () { offset = 0; changed(); }, 200);
    });
    order.addEventListener("change", function () { offset = 0; changed(); });
    document.getElementById("csl-tools").addEventListener("submit", function (event) { event.preventDefault(); });
    live.addEventListener("click", function () {
      var on = live.getAttribute("aria-pressed") !== "true";
      live.setAttribute("aria-pressed", String(on));
      setText(document.getElementById("csl-live-text"), on ? "Live" : "Paused");
      if (on) polling.go();
      else polling.stop();
    });
    polling.now();
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
    if (lock.sentence) node.appendChild(el("p", "csl-sentence", lock.sentence));
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

  var page = document.getElementById("csl-locks"), task = document.getElementById("taskid");
  var worker = document.getElementById("workername"), tasks = document.getElementById("tasks-table");
  if (page) locksPage(page);
  if (task) taskPage(task.textContent.trim(), task.closest("header, .page-header") || document.querySelector("#task-page > header") || task);
  if (worker) workerPage(worker.textContent.trim(), worker.closest("header") || worker.parentNode);
  if (tasks && window.jQuery) tasksPage(tasks);
})();
