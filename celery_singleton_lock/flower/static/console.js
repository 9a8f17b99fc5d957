/* The Locks page. Uses locks.js. All values are set as text. No HTML is built from strings. */
(function () {
  "use strict";

  var shared = window.celerySingletonLock, root = document.getElementById("csl-locks");
  if (!shared || !root) return;
  var el = shared.el, setText = shared.setText, name = shared.name, duration = shared.duration;

  var PAGE = 50; // locks on a page
  var LABELS = {
    paused: "paused", dead: "dead holder", unserved: "no worker", idle: "not granted", waiting: "waiting", held: "held"
  };
  var COLUMNS = ["Select", "Lock", "State", "Held by", "Waiting", "Longest hold and wait"];
  var mayChange = !root.dataset.readOnly;

  function byId(id) { return document.getElementById("csl-" + id); }

  function button(text, classes, key, act) {
    var node = el("button", "btn btn-sm " + classes, text);
    node.type = "button";
    if (key) node.dataset.key = key;
    if (act) node.addEventListener("click", act);
    return node;
  }

  // Replaces the content of a cell. Keeps the keyboard focus, and a text that somebody is selecting.
  function swap(cell, node) {
    var active = document.activeElement, marked = getSelection();
    if (marked && !marked.isCollapsed && cell.contains(marked.anchorNode)) return;
    var key = active && active !== cell && cell.contains(active) ? active.dataset.key : null;
    cell.replaceChildren(node);
    var again = key && cell.querySelector('[data-key="' + CSS.escape(key) + '"]');
    if (again) again.focus({preventScroll: true});
  }

  function post(path, body) {
    return fetch(shared.prefix + "/api/locks/" + path, {
      method: "POST",
      credentials: "same-origin",
      headers: {"Content-Type": "application/json", "X-XSRFToken": root.dataset.token},
      body: JSON.stringify(body)
    }).then(function (response) {
      return response.text().then(function (text) {
        var answer;
        try {
          answer = JSON.parse(text);
        } catch (_) {
          answer = {error: text};
        }
        if (!response.ok) throw new Error(answer.error || "Flower answers with status " + response.status + ".");
        return answer;
      });
    });
  }

  // -- what is asked ----------------------------------------------------------------------------

  var rows = byId("rows"), search = byId("search"), order = byId("order"), longer = byId("longer");
  var error = byId("error"), live = byId("live"), empty = byId("empty"), back = byId("back"), next = byId("next");
  var known = new URLSearchParams(location.search), shown = new Map(), selected = new Set(), marked = new Set();
  var offset = parseInt(known.get("offset"), 10) || 0, opened = known.get("open") || "";
  var state = known.get("state") || "", audit = byId("audit");
  audit.hidden = !known.get("audit");

  function choose(field, value) {
    if (value) field.value = value;
    if (field.selectedIndex < 0) field.selectedIndex = 0;
  }

  search.value = known.get("search") || "";
  choose(order, known.get("order"));
  choose(longer, known.get("longer"));
  if (!byId("states").querySelector('[data-state="' + CSS.escape(state) + '"]')) state = "";

  function query(full) {
    var asked = new URLSearchParams();
    if (search.value) asked.set("search", search.value);
    if (state) asked.set("state", state);
    if (longer.value !== "0") asked.set("longer", longer.value);
    if (full || order.value !== "trouble") asked.set("order", order.value);
    if (offset) asked.set("offset", offset);
    if (opened) asked.set("open", opened);
    if (!audit.hidden) asked.set("audit", full ? 100 : 1);
    return asked;
  }

  var polling = shared.poll(function () { return shared.prefix + "/locks/data?" + query(true); }, show, function (text) {
    error.hidden = false;
    setText(error, text);
    root.dataset.state = "error";
  });

  function changed() {
    var text = query(false).toString();
    history.replaceState(null, "", location.pathname + (text ? "?" + text : ""));
    markOrder();
    polling.now();
  }

  function restart() {
    offset = 0;
    changed();
  }

  function markOrder() {
    byId("table").querySelectorAll("th[data-order]").forEach(function (head) {
      var on = head.dataset.order === order.value;
      if (on) head.setAttribute("aria-sort", order.value === "name" ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
  }

  // -- the list ---------------------------------------------------------------------------------

  function show(answer) {
    error.hidden = true;
    if (offset && offset >= answer.listed) return restart();
    var longest = Math.max.apply(null, answer.locks.map(function (lock) {
      return Math.max(lock.held_for, lock.oldest);
    }).concat(1));
    var wanted = new Set(answer.locks.map(function (lock) { return lock.id; }));
    shown.forEach(function (row, id) {
      if (wanted.has(id)) return;
      row.remove();
      shown.delete(id);
      selected.delete(id); // nobody changes what he does not see
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
    showAudit(answer.audit || []);
    if (focus && focus !== document.activeElement && document.contains(focus)) focus.focus();
    summary(answer);
    countSelected();
  }

  function summary(answer) {
    var first = answer.locks.length ? answer.offset + 1 : 0, last = answer.offset + answer.locks.length;
    var text = answer.total + (answer.total === 1 ? " lock" : " locks") + ", " + answer.waiting + " waiting";
    if (answer.listed < answer.total) text += "; only the first " + answer.listed + " are listed: search to find others";
    if (answer.keys) {
      text += "; Redis has " + answer.keys + " keys, so only locks with waiters are listed and counted: " +
        "dead holder, paused, held or a search (* finds all) reads all locks";
    }
    if (answer.unread) text += "; " + answer.unread + " more locks with waiters were not read";
    if (answer.broken) text += "; " + answer.broken + " keys with names of locks hold other data";
    setText(byId("summary"), text);
    setText(byId("age"), answer.age > 2 ? "read " + duration(answer.age) + " ago" : "");
    byId("states").querySelectorAll("button").forEach(function (each) {
      var count = answer.states[each.dataset.state || "all"] || 0;
      setText(each.firstChild, count.toLocaleString("en"));
      each.classList.toggle("csl-none", !count);
      each.setAttribute("aria-pressed", String(each.dataset.state === state));
    });
    setText(byId("place"), first + "–" + last + " of " + answer.listed);
    back.disabled = answer.offset === 0;
    next.disabled = last >= answer.listed;
    back.onclick = function () { offset = Math.max(0, answer.offset - PAGE); changed(); };
    next.onclick = function () { offset = last; changed(); };
    empty.hidden = answer.locks.length > 0;
    var all = answer.states.all || 0;
    setText(empty, search.value && !all ? "No lock that is held or waited for matches the search." :
      all ? "No lock is in this state. " + all + " are not shown." :
        answer.keys ? "No task waits for a lock." :
          "No lock is held or waited for. A lock appears here when a task takes it.");
    root.dataset.state = "shown";
  }

  function newRow(lock) {
    var row = el("tr"), fold = el("button", "csl-fold"), check = el("input", "form-check-input");
    COLUMNS.forEach(function (label) { row.appendChild(el("td")).dataset.label = label; });
    row.cells[0].className = "csl-check";
    check.type = "checkbox";
    check.setAttribute("aria-label", "Select " + lock.name);
    check.addEventListener("change", function () {
      if (check.checked) selected.add(lock.id);
      else selected.delete(lock.id);
      countSelected();
    });
    if (mayChange) row.cells[0].appendChild(check);
    fold.type = "button";
    fold.appendChild(name(lock.name));
    fold.addEventListener("click", function () {
      opened = opened === lock.id ? "" : lock.id;
      marked.clear();
      changed();
    });
    row.cells[1].append(fold, el("span", "csl-small csl-why"));
    row.dataset.lock = lock.id;
    var bars = row.cells[5].appendChild(el("div", "csl-bars"));
    ["held", "waited"].forEach(function (kind) {
      bars.appendChild(el("span", "csl-track")).appendChild(el("span", "csl-bar csl-bar-" + kind));
      bars.appendChild(el("span"));
    });
    shown.set(lock.id, row);
    return row;
  }

  function badge(lock) {
    var kind = lock.stuck ? "stuck" : lock.state === "dead" || lock.state === "paused" ? "look" : lock.state;
    return el("span", "csl-state csl-state-" + kind, LABELS[lock.state] || lock.state);
  }

  function fill(row, lock, longest) {
    var cells = row.cells, bars = cells[5].firstChild.children;
    row.classList.toggle("csl-stuck", lock.stuck);
    cells[1].firstChild.setAttribute("aria-expanded", String(opened === lock.id));
    setText(cells[1].lastChild, lock.sentence);
    swap(cells[2], badge(lock));
    swap(cells[3], shared.holdersNode(lock));
    var text = lock.adrift ? lock.adrift + " without a worker" : String(lock.waiting);
    if (lock.aside) text = lock.aside + " out of the queue";
    if (lock.adrift && lock.waiting) text = lock.waiting + " + " + text;
    setText(cells[4], text);
    [lock.held_for, lock.oldest].forEach(function (value, i) {
      bars[2 * i].firstChild.style.width = value ? Math.max(1, 100 * value / longest) + "%" : "0";
      setText(bars[2 * i + 1], (i ? lock.waiting : lock.held) ? (i ? "waited " : "held ") + duration(value) : "");
    });
  }

  // -- one lock ---------------------------------------------------------------------------------

  // Since when a unique call has been with the workers, or for how long it counts as sent.
  function counts(call) {
    return call.expires_in === null ? "since " + duration(call.age) : "for another " + duration(call.expires_in);
  }

  function details(lock) {
    var old = byId("more"), row = lock && shown.get(lock.id);
    if (old && old.dataset.of !== (row ? lock.id : "")) old.remove();
    if (!row) return;
    var more = byId("more");
    if (!more) {
      more = el("tr", "csl-more");
      more.id = "csl-more";
      more.dataset.of = lock.id;
      more.appendChild(el("td")).colSpan = COLUMNS.length;
    }
    if (row.nextElementSibling !== more) row.after(more);
    swap(more.cells[0], detailsNode(lock));
  }

  function detailsNode(lock) {
    var node = el("div"), self = [{id: lock.id}];
    if (lock.length > 200) node.appendChild(el("div", "csl-full")).appendChild(name(lock.name));
    function left(seconds) { return seconds ? " for another " + duration(seconds) : ""; }
    if (lock.paused) node.appendChild(el("p", "csl-sentence", "Paused" + left(lock.pause_left) + " by " + lock.paused));
    if (lock.closed) node.appendChild(el("p", "csl-sentence", "Closed" + left(lock.closed_for) + ", " + lock.closed));
    if (lock.limit_by === "operator") {
      node.appendChild(el("p", "", "Limit " + lock.limit + ", set by an operator" + left(lock.limit_left)));
    } else if (lock.limit_by === "arguments") {
      node.appendChild(el("p", "", "Limit " + lock.limit + ", computed from the arguments of a task"));
    }
    if ((lock.rates || []).length) {
      var by = lock.rates_set ? ", set by an operator" + left(lock.rates_left) : "";
      node.appendChild(el("p", "", "Rate: " + lock.rates.map(function (rate, i) {
        return rate + (lock.operator_rates[i] ? by : "");
      }).join(", ")));
    }
    if (lock.sentence) node.appendChild(shared.reasonNode(lock.waits_for, "First waiter: " + lock.sentence));
    if (mayChange) {
      var bar = node.appendChild(el("div", "csl-actions"));
      bar.setAttribute("role", "group");
      bar.setAttribute("aria-label", "Change this lock");
      var act = function (action, text, danger) {
        bar.appendChild(button(text, danger ? "btn-outline-danger" : "btn-outline-secondary", "act " + action,
          function () { change(action, self, lock); }));
      };
      if (lock.paused) act("resume", "Resume…");
      else act("pause", "Pause…");
      if (lock.closed) act("reopen", "Reopen…");
      act("limit", "Limit " + lock.limit + "…");
      act("rate", "Rate…");
      if (lock.queue.length) act("drop", "Drop all waiting…", true);
    }
    charts(node, lock.history);
    table(node, "Holders", ["Task", "Worker", "State", "Held for", "Lease left", "Fencing token", "Action"],
      lock.holders, function (holder) {
        return [holder.task_id ? shared.taskLink(holder.task_id, holder.task) : name(holder.client),
          name(holder.worker), shared.stateOf(holder), duration(holder.held_for), duration(holder.left), holder.fence,
          mayChange ? button("Release…", "btn-outline-danger csl-release", "release " + holder.token, function () {
            release(lock, holder);
          }) : ""];
      });
    if (lock.groups.length) {
      table(node, "Groups", ["Group", "Waiting", "Held", "Limit"], lock.groups, function (group) {
        return [group.name ? name(group.name) : "(tasks without a group)", String(group.waiting), String(group.held),
          group.is_at_limit ? "reached" : ""];
      });
      var rest = lock.groups_waiting - lock.groups.length;
      if (rest > 0) node.appendChild(el("p", "csl-small", "and " + rest + " more groups"));
    }
    table(node, "Unique calls", ["Alike by", "First task", "State", "Counts", "Duplicates that wait for it"],
      lock.calls, function (call) {
        return [name(call.key), shared.taskLink(call.task_id, ""), call.state, counts(call), String(call.followers)];
      });
    queue(node, lock);
    var left = lock.waiting + lock.adrift - lock.queue.length;
    if (left > 0) node.appendChild(el("p", "csl-small", "and " + left + " more waiters"));
    return node;
  }

  function queue(node, lock) {
    var heads = ["Rank", "Task", "State", "Has waited", "Broker queue", "Action"], buttons = [];
    var there = new Set(lock.queue.map(function (waiter) { return waiter.token; }));
    marked.forEach(function (token) { if (!there.has(token)) marked.delete(token); });
    function refresh() {
      buttons.forEach(function (each) { each.disabled = !marked.size; });
    }
    table(node, "Queue", heads, lock.queue, function (waiter) {
      var what = waiter.task_id ? shared.taskLink(waiter.task_id, waiter.task) : document.createTextNode("a client");
      var cell = el("span", "csl-row-actions"), target = [{id: lock.id, token: waiter.token}];
      var rank = el("span", "", waiter.rank ? String(waiter.rank) : "–");
      if (mayChange) {
        var check = el("input", "form-check-input"), label = el("label", "csl-pick");
        check.type = "checkbox";
        check.checked = marked.has(waiter.token);
        check.dataset.key = "mark " + waiter.token;
        check.setAttribute("aria-label", "Select the waiter of rank " + rank.textContent);
        check.addEventListener("change", function () {
          if (check.checked) marked.add(waiter.token);
          else marked.delete(waiter.token);
          refresh();
        });
        label.append(check, " ", rank);
        rank = label;
        if (waiter.rank !== 1) {
          cell.appendChild(button("Promote…", "btn-outline-secondary", "promote " + waiter.token, function () {
            change("promote", target, lock);
          }));
        }
        cell.appendChild(button("Drop…", "btn-outline-danger", "drop " + waiter.token, function () {
          change("drop", target, lock);
        }));
      }
      let age = duration(waiter.age);
      if (waiter.head_start) {
        age += waiter.head_start > 0 ? ", head start " : ", lets pass for ";
        age += duration(Math.abs(waiter.head_start));
      }
      if (waiter.state === "settling") age += ", queues in " + duration(waiter.settles_for) + " at the earliest";
      if (waiter.group) age += ", group " + waiter.group;
      return [rank, what, waiter.state, age, name(waiter.queue), cell];
    });
    if (!mayChange || lock.queue.length < 2) return;
    var bar = node.appendChild(el("div", "csl-actions"));
    [["promote", "Promote the selected…", "btn-outline-secondary"],
      ["drop", "Drop the selected…", "btn-outline-danger"]].forEach(function (each) {
      buttons.push(bar.appendChild(button(each[1], each[2], "marked " + each[0], function () {
        change(each[0], lock.queue.filter(function (waiter) { return marked.has(waiter.token); })
          .map(function (waiter) { return {id: lock.id, token: waiter.token}; }), lock);
      })));
    });
    refresh();
  }

  function table(parent, title, heads, entries, cells) {
    if (!entries.length) return;
    var card = parent.appendChild(el("div", "csl-scroll")), node = card.appendChild(el("table"));
    var head = node.createTHead().insertRow();
    card.tabIndex = 0; // a wide table is scrolled with the keyboard
    card.setAttribute("role", "region");
    card.setAttribute("aria-label", title);
    card.dataset.key = "table " + title;
    node.createCaption().textContent = title;
    heads.forEach(function (text) { head.appendChild(el("th", "", text)).scope = "col"; });
    var body = node.createTBody();
    entries.forEach(function (entry) {
      var row = body.insertRow();
      cells(entry).forEach(function (cell, i) {
        var at = row.insertCell();
        at.dataset.label = heads[i];
        at.append(cell);
      });
    });
  }

  // The times of the last tasks as bars, and in words.
  function chart(label, values, kind) {
    var figure = el("figure", "csl-chart"), sorted = values.slice().sort(function (a, b) { return a - b; });
    var longest = sorted[sorted.length - 1], height = 36, step = 4;
    var told = label + " of the last " + (values.length === 1 ? "task" : values.length + " tasks") + ": median " +
      exact(sorted[Math.floor((sorted.length - 1) / 2)]) + ", longest " + exact(longest) + ".";
    function exact(seconds) {
      return seconds < 0.1 ? Math.round(1000 * seconds) + " ms" : duration(seconds);
    }
    function svg(tag, about) {
      var node = document.createElementNS("http://www.w3.org/2000/svg", tag);
      Object.keys(about).forEach(function (key) { node.setAttribute(key, about[key]); });
      return node;
    }
    var picture = svg("svg", {viewBox: "0 0 " + 60 * step + " " + height, width: 60 * step, height: height,
      role: "img", "aria-label": told, "class": "csl-chart-" + kind});
    picture.appendChild(svg("line", {x1: 0, x2: 60 * step, y1: height - 0.5, y2: height - 0.5}));
    values.forEach(function (value, i) {
      var high = Math.max(1, (height - 2) * value / (longest || 1));
      picture.appendChild(svg("rect", {x: (60 - values.length + i) * step, y: height - 1 - high, width: step - 1,
        height: high}));
    });
    figure.appendChild(picture);
    figure.appendChild(el("figcaption", "csl-small", told));
    return figure;
  }

  function charts(node, history) {
    var bar = el("div", "csl-charts");
    if (history.waited.length) bar.appendChild(chart("Wait", history.waited, "waited"));
    if (history.held.length) bar.appendChild(chart("Hold", history.held, "held"));
    if (bar.firstChild) node.appendChild(bar);
  }

  // -- the audit --------------------------------------------------------------------------------

  function showAudit(entries) {
    byId("audit-open").setAttribute("aria-expanded", String(!audit.hidden));
    if (audit.hidden) return;
    var node = el("div", "csl-more");
    table(node, "What operators have changed, newest first", ["When", "Who", "What", "Lock", "Why"], entries,
      function (entry) {
        var when = el("time", "", new Date(1000 * entry.at).toISOString().slice(0, 19).replace("T", " ") + " UTC");
        var what = entry.action + (entry.count > 1 ? " ×" + entry.count : "") + (entry.to ? " " + entry.to : "");
        var lock = el("span");
        lock.appendChild(name(entry.lock));
        if (entry.more) lock.appendChild(document.createTextNode(" and " + entry.more + " more"));
        return [when, name(entry.who + "@" + entry.host + " (" + entry.via + ")"), what, lock, name(entry.why)];
      });
    if (!entries.length) node.appendChild(el("p", "csl-small", "The audit has no entries."));
    swap(audit, node);
  }

  byId("audit-open").addEventListener("click", function () {
    audit.hidden = !audit.hidden;
    changed();
  });

  // -- changes ----------------------------------------------------------------------------------

  var dialog = byId("dialog"), title = byId("dialog-title"), text = byId("dialog-text"), items = byId("dialog-items");
  var yes = byId("dialog-yes"), end = byId("dialog-end"), permits = byId("dialog-permits");
  var ratesField = byId("dialog-rates"), rates = byId("dialog-rate");
  var timeField = byId("dialog-time"), time = byId("dialog-for");
  var number = byId("dialog-number"), why = byId("dialog-why"), reason = byId("dialog-reason");
  var VERBS = {
    pause: "Pause", resume: "Resume", reopen: "Reopen", limit: "Set the limit", rate: "Set the rate", promote: "Promote", drop: "Drop", release: "Release"
  };

  function ask(heading, question, lines, more) {
    byId("done").replaceChildren(); // what was said of an earlier change
    setText(title, heading);
    setText(text, question);
    items.replaceChildren();
    lines.forEach(function (line) { items.appendChild(el("li")).appendChild(name(line)); });
    if (more) items.appendChild(el("li", "", "and " + more + " more"));
    why.value = "";
    reason.hidden = yes.hidden = yes.disabled = end.disabled = false;
    permits.hidden = ratesField.hidden = timeField.hidden = end.hidden = true;
    rates.value = time.value = "";
    byId("dialog-no").onclick = function () { dialog.close(); };
    setText(byId("dialog-no"), "Cancel");
  }

  function failed(problem) {
    setText(title, "Not done");
    setText(text, problem.message || String(problem));
    items.replaceChildren();
    yes.hidden = end.hidden = reason.hidden = permits.hidden = ratesField.hidden = timeField.hidden = true;
    setText(byId("dialog-no"), "Close");
    polling.now();
  }

  function submit(path, body, told) {
    yes.disabled = end.disabled = true;
    post(path, Object.assign({why: why.value}, body)).then(function (answer) {
      dialog.close();
      done(answer.text || told, answer.refused || []);
      polling.now();
    }).catch(failed);
  }

  function done(told, refused) {
    var node = byId("done");
    node.replaceChildren(el("p", "csl-told", told));
    if (refused.length) {
      var list = node.appendChild(el("ul", "csl-refused"));
      refused.forEach(function (each) { list.appendChild(el("li", "", "Not done: " + each)); });
    }
    node.appendChild(button("Close", "btn-outline-secondary", "", function () {
      node.replaceChildren();
      search.focus();
    }));
  }

  // The server says what would be changed. If something can be lost, it is asked twice.
  function change(action, targets, lock) {
    ask(VERBS[action], "…", [], 0);
    yes.disabled = true;
    yes.className = "btn btn-primary";
    setText(yes, VERBS[action]);
    dialog.showModal();
    post("change", {action: action, targets: targets, sure: false}).then(function (answer) {
      ask(VERBS[action], answer.question, answer.items, answer.more);
      permits.hidden = action !== "limit";
      ratesField.hidden = action !== "rate";
      timeField.hidden = ["pause", "limit", "rate"].indexOf(action) < 0;
      rates.value = lock && action === "rate" ? (lock.rates || []).join(", ") : "";
      number.value = lock && action === "limit" ? lock.limit || "" : "";
      if (answer.risk) yes.className = "btn btn-danger";
      setText(yes, answer.risk ? "Continue" : VERBS[action]);
      function carryOut() {
        if (!number.checkValidity()) return number.reportValidity();
        submit("change", {
          action: action, targets: answer.targets, asked_at: answer.asked_at, sure: true,
          permits: action === "limit" && number.value ? Number(number.value) : null,
          rates: action === "rate" ? rates.value : "",
          for: timeField.hidden ? "" : time.value.trim()
        });
      }
      yes.onclick = !answer.risk ? carryOut : function () {
        setText(title, "Are you sure?");
        setText(text, answer.risk);
        setText(yes, VERBS[action]);
        yes.onclick = carryOut;
      };
      (action === "limit" ? number : action === "rate" ? rates : why).focus();
    }).catch(failed);
  }

  // One holder: its task can be ended instead.
  function release(lock, holder) {
    var who = (holder.task_id ? holder.task + "[" + holder.task_id + "]" : holder.client) +
      (holder.worker ? " on " + holder.worker : "");
    ask("Take the lock from this holder?", "The holder is " + who + ".", [lock.name], 0);
    yes.className = "btn btn-danger";
    setText(yes, "Continue");
    yes.onclick = function () {
      yes.disabled = true;
      post("release", {id: lock.id, token: holder.token, sure: false}).then(function (answer) {
        if (!answer.risk) throw new Error("It does not hold the lock any more.");
        yes.disabled = false;
        setText(title, "Are you sure?");
        setText(text, answer.risk + (holder.task_id ? " Or end the task: its worker stops it, its work is lost, " +
          "and the next waiter gets the lock when the task has ended." : ""));
        setText(yes, "Release");
        end.hidden = !holder.task_id;
        yes.onclick = function () {
          submit("release", {id: lock.id, token: holder.token, sure: true}, "Released.");
        };
        end.onclick = function () {
          submit("release", {id: lock.id, token: holder.token, sure: true, terminate: true},
            "The worker was told to end the task.");
        };
      }).catch(failed);
    };
    dialog.showModal();
    why.focus();
  }

  // -- many locks -------------------------------------------------------------------------------

  function countSelected() {
    var all = byId("all"), count = selected.size;
    byId("bulk").hidden = !mayChange || !shown.size;
    setText(byId("selected"), count ? count + " selected" : "Select all shown");
    all.checked = count > 0 && count === shown.size;
    all.indeterminate = count > 0 && count < shown.size;
    byId("bulk").querySelectorAll("[data-action]").forEach(function (each) { each.disabled = !count; });
    shown.forEach(function (row, id) {
      var check = row.cells[0].firstChild;
      if (check) check.checked = selected.has(id);
      row.classList.toggle("csl-chosen", selected.has(id));
    });
  }

  byId("all").addEventListener("change", function (event) {
    selected.clear();
    if (event.target.checked) shown.forEach(function (_, id) { selected.add(id); });
    countSelected();
  });
  byId("bulk").querySelectorAll("[data-action]").forEach(function (each) {
    each.addEventListener("click", function () {
      change(each.dataset.action, Array.from(selected, function (id) { return {id: id}; }), null);
    });
  });

  // -- controls ---------------------------------------------------------------------------------

  var typing = null;
  search.addEventListener("input", function () {
    clearTimeout(typing);
    typing = setTimeout(restart, 200);
  });
  order.addEventListener("change", restart);
  longer.addEventListener("change", restart);
  byId("tools").addEventListener("submit", function (event) { event.preventDefault(); });
  byId("states").querySelectorAll("button").forEach(function (each) {
    each.addEventListener("click", function () {
      state = state === each.dataset.state ? "" : each.dataset.state;
      restart();
    });
  });
  byId("table").querySelectorAll("th[data-order] button").forEach(function (each) {
    each.addEventListener("click", function () {
      order.value = each.parentNode.dataset.order;
      restart();
    });
  });
  live.addEventListener("click", function () {
    var on = live.getAttribute("aria-pressed") !== "true";
    live.setAttribute("aria-pressed", String(on));
    setText(byId("live-text"), on ? "Live" : "Paused");
    if (on) polling.go();
    else polling.stop();
  });
  document.addEventListener("keydown", function (event) {
    var at = document.activeElement, writes = at && /^(INPUT|SELECT|TEXTAREA)$/.test(at.tagName);
    if (dialog.open || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/" && !(writes && at.type !== "checkbox")) {
      event.preventDefault();
      search.focus();
      search.select();
    }
    if (at && at.classList.contains("csl-fold") && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      var folds = Array.from(rows.querySelectorAll(".csl-fold"));
      var to = folds[folds.indexOf(at) + (event.key === "ArrowDown" ? 1 : -1)];
      event.preventDefault();
      if (to) to.focus();
    }
  });
  markOrder();
  polling.now();
})();
