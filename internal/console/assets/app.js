// The frame of the console: which page is shown, who is logged in, and the first line that says whether all is well.

import { render } from './vendor/preact.js';
import { useEffect, useState } from './vendor/hooks.js';
import { about, call, logout, seconds } from './api.js';
import { time } from './format.js';
import { html, Problem, useLoad } from './ui.js';
import { Login } from './login.js';
import { Overview } from './overview.js';
import { Activity } from './activity.js';
import { Slow } from './slow.js';
import { Space } from './space.js';
import { Keys } from './keys.js';
import { Leases } from './leases.js';
import { Backups } from './backups.js';
import { Archive } from './archive.js';
import { Users } from './users.js';
import { Configuration } from './configuration.js';

const pages = [
  ['overview', 'Overview', Overview], ['activity', 'Activity', Activity], ['slow', 'Slow requests', Slow], ['space', 'Space', Space],
  ['keys', 'Keys', Keys], ['leases', 'Leases and locks', Leases], ['backups', 'Backups', Backups], ['archive', 'Log archive', Archive],
  ['users', 'Users', Users], ['configuration', 'Configuration', Configuration],
];

const current = () => pages.find(([id]) => location.hash === '#' + id) || pages[0];

const severities = { SEVERITY_WARNING: 'WARN', SEVERITY_DEGRADED: 'CRIT', SEVERITY_UNAVAILABLE: 'CRIT' };

// Verdict is the first line: OK, WARN or CRIT, why, and since when.
function Verdict({ status, error }) {
  if (error && (error.status === 0 || error.status >= 500)) {
    return html`<div class="verdict crit" role="status"><b>CRIT</b>${error.message}</div>`;
  }
  if (!status) return html`<div class="verdict" role="status">${error ? '' : 'Loading …'}</div>`;
  const { state, cause, conditions } = status.health;
  const worst = conditions[0];
  const level = conditions.some((c) => severities[c.severity] === 'CRIT') || state === 'STATE_READ_ONLY' || state === 'STATE_UNAVAILABLE' ? 'CRIT'
    : conditions.length || state === 'STATE_DRAINING' ? 'WARN' : 'OK';
  const since = (c) => `since ${new Date(c.since).toLocaleString()} (${time((Date.now() - new Date(c.since)) / 1000)})`;
  const text = worst ? `${worst.message}${worst.cause ? ': ' + worst.cause : ''}, ${since(worst)}`
    : state === 'STATE_SERVING' ? `reads and writes are served; up for ${time(seconds(status.uptime))}` : cause || state;
  return html`<div class="verdict ${level.toLowerCase()}" role="status"><b>${level}</b>${text}
    ${conditions.length > 1 ? html`<ul>${conditions.slice(1).map((c) => html`<li>${severities[c.severity]}: ${c.message}${c.cause ? ': ' + c.cause : ''}, ${since(c)}</li>`)}</ul>` : ''}
  </div>`;
}

function App() {
  const [page, setPage] = useState(current());
  const [round, setRound] = useState(0);
  useEffect(() => {
    const changed = () => { setPage(current()); document.getElementById('main')?.focus(); };
    addEventListener('hashchange', changed);
    return () => removeEventListener('hashchange', changed);
  }, []);
  useEffect(() => { document.title = `${page[1]} – EpochKV`; }, [page]);
  const server = useLoad(about, 0, [round]);
  const status = useLoad(() => call('AdminService/Status'), 5, [round]);
  const entered = () => setRound(round + 1);
  if (status.error && status.error.status === 401) return html`<main id="main"><h1>Log in</h1><${Login} done=${entered} /></main>`;
  const end = async () => { try { await logout(); } finally { setRound(round + 1); } };
  const [id, title, Page] = page;
  return html`<a class="skip" href="#main" onClick=${(e) => { e.preventDefault(); document.getElementById('main').focus(); }}>Skip to content</a>
    <header><strong>EpochKV</strong>
      <nav aria-label="Pages">${pages.map(([to, text]) => html`<a href=${'#' + to} aria-current=${to === id ? 'page' : null}>${text}</a>`)}</nav>
      <span class="who">${status.value ? `${status.value.build.version} on ${location.host}` : ''} ${server.value && server.value.login ? html`<button onClick=${end}>Log out</button>` : ''}</span>
    </header>
    <main id="main" tabindex="-1"><h1>${title}</h1>
      <${Verdict} status=${status.value} error=${status.error} />
      ${status.error && status.error.status === 403 ? html`<${Problem} error=${status.error} />` : ''}
      <${Page} key=${id + round} status=${status.value} changes=${server.value && server.value.changes} entered=${entered} />
    </main>`;
}

render(html`<${App} />`, document.getElementById('app'));
