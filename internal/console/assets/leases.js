import { call, encodeKey, fromBase64, seconds, showBytes, toBase64 } from './api.js';
import { moment, time } from './format.js';
import { Confirmed, html, Problem, Table, useLoad } from './ui.js';
import { useState } from './vendor/hooks.js';

const listed = 200;
const listedKeys = 100;

// remaining is the time until a lease ends; without keep-alives.
const remaining = (l) => (l.revoking ? 'is ending' : time(seconds(l.remaining)));

// Keys lists the keys that a lease deletes at its end.
function Keys({ id, round }) {
  const { value, error } = useLoad(() => call('LeaseService/GetLease', { id, keys: listedKeys }), 5, [id, round]);
  return html`<h2>Lease ${id}</h2><${Problem} error=${error} />
    ${value && !error ? html`<${Table} caption=${`Keys that the end of the lease deletes${value.more ? `, the first ${listedKeys}` : ''}`} rows=${value.keys} columns=${[
      { title: 'Key', value: (key) => html`<span class="bytes">${showBytes(key)}</span>` }]} />` : ''}`;
}

// lookUp asks for the holder of a lock, and for the lease with which it is held. A user may see the one and not the other.
async function lookUp(name) {
  const { holder } = await call('LockService/GetLock', { name });
  const held = holder && holder.leaseId !== '0' ? holder : null;
  if (!held) return { name, held };
  try { return { name, held, lease: (await call('LeaseService/GetLease', { id: held.leaseId })).lease }; } catch (error) { return { name, held, error }; }
}

// boundsOf are the bounds of the names that begin with a prefix.
function boundsOf(prefix) {
  let end = fromBase64(prefix);
  while (end.length > 0 && end[end.length - 1] === 255) end = end.slice(0, -1);
  if (end.length > 0) end[end.length - 1]++;
  return { start: prefix, end: toBase64(end) };
}

// Locks lists the locks whose names begin with a text.
function Locks({ round, chosen }) {
  const [prefix, setPrefix] = useState('');
  const [after, setAfter] = useState('');
  const { value, error } = useLoad(() => call('LockService/ListLocks', { ...boundsOf(prefix), after, limit: listed }), 5, [prefix, after, round]);
  const rows = value && value.locks;
  const submit = (e) => { e.preventDefault(); setPrefix(encodeKey(new FormData(e.target).get('prefix'))); setAfter(''); };
  const waiting = (l) => (l.waiters ? `${l.waiters}: ${l.waitingLeases.join(', ')}${l.waiters > l.waitingLeases.length ? ', …' : ''}` : '–');
  return html`<h2>Locks</h2>
    <form class="bar" onSubmit=${submit}><label>Names that begin with <input name="prefix" spellcheck="false" /></label><button>List</button></form>
    <${Problem} error=${error} />
    ${value && !error ? html`<${Table} caption="Locks that are held or waited for" rows=${rows} columns=${[
      { title: 'Name', value: (l) => html`<button class="link bytes" aria-label=${`Lock ${showBytes(l.name)}`} onClick=${() => chosen(l.name)}>${showBytes(l.name)}</button>` },
      { title: 'Held by lease', number: true, value: (l) => (l.holder.leaseId === '0' ? '–' : l.holder.leaseId) },
      { title: 'Token', number: true, value: (l) => l.holder.token }, { title: 'Waiting leases', value: waiting }]} />` : ''}
    ${after ? html`<button onClick=${() => setAfter('')}>First locks</button> ` : ''}
    ${value && value.more ? html`<button onClick=${() => setAfter(rows[rows.length - 1].name)}>Next locks</button>` : ''}`;
}

// Lock shows the holder of a lock.
function Lock({ changes, changed, name, setName }) {
  const [round, again] = useState(0);
  const { value, error } = useLoad(() => (name === null ? null : lookUp(name)), 5, [name, round]);
  const submit = (e) => { e.preventDefault(); setName(encodeKey(new FormData(e.target).get('lock'))); again(round + 1); };
  const shown = value && value.name === name ? value : null;
  const lock = shown && showBytes(shown.name);
  return html`<form class="bar" onSubmit=${submit}><label>Name of a lock <input name="lock" required spellcheck="false" /></label><button>Look up</button></form>
    <${Problem} error=${error} />
    <div aria-live="polite">${shown && !error ? (shown.held ? html`<section class="panel"><h3>Lock <span class="bytes">${lock}</span></h3>
      <p>Held by lease ${shown.held.leaseId} with token ${shown.held.token}${shown.held.value ? html`, and the value <span class="bytes">${showBytes(shown.held.value)}</span>` : ''}.</p>
      ${shown.lease ? html`<p>The lease${shown.lease.owner ? ` of ${shown.lease.owner}` : ''} ends in ${remaining(shown.lease)} without a keep-alive.</p>` : ''}
      <${Problem} error=${shown.error} />
      ${changes ? html`<${Confirmed} text="Release" what=${`lock ${lock}`} ask="Its holder is not told." method="LockService/ReleaseLock"
        message=${{ name: shown.name, token: shown.held.token }} done=${() => { again(round + 1); changed(); }} />` : ''}</section>`
      : html`<p>No lease holds lock <span class="bytes">${lock}</span>.</p>`) : ''}</div>`;
}

// Leases lists the leases, and looks up locks.
export function Leases({ changes }) {
  const [round, again] = useState(0);
  const [after, setAfter] = useState('0');
  const [chosen, choose] = useState(null);
  const [lock, setLock] = useState(null);
  const { value, error } = useLoad(() => call('LeaseService/ListLeases', { after, limit: listed }), 5, [after, round]);
  const rows = value && value.leases;
  const revoke = { title: 'Revoke', value: (l) => html`<${Confirmed} text="Revoke" what=${`lease ${l.id}`} ask="Its keys are deleted, and its locks are released."
    method="LeaseService/RevokeLease" message=${{ id: l.id }} done=${() => again(round + 1)} />` };
  return html`<${Problem} error=${error} />
    ${changes ? '' : html`<p class="dim">The console is read-only: kvctl, or a server with --console=full, revokes leases and releases locks.</p>`}
    <${Table} caption=${after === '0' ? 'Leases' : `Leases after ${after}`} rows=${rows} columns=${[
      { title: 'Id', number: true, value: (l) => html`<button class="link" aria-label=${`Keys of lease ${l.id}`} onClick=${() => choose(l.id)}>${l.id}</button>` },
      { title: 'Owner', value: (l) => l.owner || '–' }, { title: 'Remaining', number: true, value: remaining },
      { title: 'Time to live', number: true, value: (l) => time(seconds(l.ttl)) }, { title: 'Granted', value: (l) => moment(l.granted) },
      ...(changes ? [revoke] : [])]} />
    ${after !== '0' ? html`<button onClick=${() => setAfter('0')}>First leases</button> ` : ''}
    ${value && value.more ? html`<button onClick=${() => setAfter(rows[rows.length - 1].id)}>Next leases</button>` : ''}
    ${chosen ? html`<div aria-live="polite"><${Keys} id=${chosen} round=${round} /></div>` : ''}
    <${Locks} round=${round} chosen=${setLock} />
    <${Lock} changes=${changes} changed=${() => again(round + 1)} name=${lock} setName=${setLock} />`;
}
