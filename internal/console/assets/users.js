import { call, showBytes } from './api.js';
import { moment } from './format.js';
import { Login } from './login.js';
import { Confirmed, html, Problem, Table, useLoad } from './ui.js';
import { useState } from './vendor/hooks.js';

const rights = (g) => ['read', 'write', 'lease'].filter((right) => g[right]).join(', ');
const range = (g) => `${showBytes(g.start) || 'first key'} – ${showBytes(g.end) || 'last key'}`;
const when = (t, never) => (t ? moment(t) : never);

const limitNames = [['requests', 'requests/s'], ['bytesIn', 'bytes in/s'], ['bytesOut', 'bytes out/s'], ['streams', 'streams'], ['watches', 'watches'], ['transactions', 'transactions']];
const limits = (u) => limitNames.filter(([field]) => u.limits && Number(u.limits[field])).map(([field, unit]) => `${u.limits[field]} ${unit}`).join(', ') || 'none';

const Grants = ({ grants }) => (grants.length ? html`<ul class="plain">${grants.map((g) => html`<li><span class="bytes">${range(g)}</span>: ${rights(g)}</li>`)}</ul>` : '–');

// load is what the user of the login may see: with the action users everything, else its own rights and tokens.
async function load() {
  const self = await call('AuthService/WhoAmI');
  if (!self.user) return { self };
  const manages = self.actions.includes('users') || self.actions.includes('all');
  const [tokens, users, roles] = await Promise.all([call('AuthService/ListTokens', { all: manages }),
    manages ? call('AuthService/ListUsers') : null, manages ? call('AuthService/ListRoles') : null]);
  return { self, manages, tokens: tokens.tokens, users: users && users.users, roles: roles && roles.roles };
}

// Users lists users, roles and tokens.
export function Users({ changes, entered }) {
  const [round, again] = useState(0);
  const { value, error } = useLoad(load, 10, [round]);
  if (!value) return html`<${Problem} error=${error} />`;
  const { self, manages, tokens, users, roles } = value;
  const checked = html`<p>${self.enabled ? 'Users are checked.' : 'Users are not checked: every client that can connect may do everything but manage users (kvctl auth enable).'}</p>`;
  if (!self.user) return html`<${Problem} error=${error} />${checked}<p>Users, roles and tokens are shown after a login.</p><${Login} done=${entered} />`;
  const done = () => again(round + 1);
  const able = { title: 'Change', value: (u) => html`<${Confirmed} text=${u.disabled ? 'Enable' : 'Disable'} what=${`user ${u.name}`}
    ask=${u.disabled ? 'Its tokens are valid again.' : 'Its requests are refused, and its streams end.'}
    method="AuthService/UpdateUser" message=${{ name: u.name, disabled: !u.disabled }} done=${done} />` };
  const revoke = { title: 'Revoke', value: (t) => html`<${Confirmed} text="Revoke" what=${`token ${t.id}`} ask="Its clients are refused."
    method="AuthService/RevokeToken" message=${{ id: t.id }} done=${done} />` };
  return html`<${Problem} error=${error} />${checked}
    ${changes ? '' : html`<p class="dim">The console is read-only: kvctl, or a server with --console=full, disables users and revokes tokens.</p>`}
    ${manages ? html`<${Table} caption="Users" rows=${users} columns=${[
      { title: 'Name', value: (u) => u.name }, { title: 'Roles', value: (u) => u.roles.join(', ') || '–' }, { title: 'State', value: (u) => (u.disabled ? 'disabled' : 'enabled') },
      { title: 'Password', value: (u) => (u.hasPassword ? 'yes' : 'no') }, { title: 'Limits', value: limits }, { title: 'Created', value: (u) => when(u.created, '–') },
      ...(changes ? [able] : [])]} />
    <${Table} caption="Roles" rows=${roles} columns=${[
      { title: 'Name', value: (r) => r.name }, { title: 'Keys and rights', value: (r) => html`<${Grants} grants=${r.grants} />` },
      { title: 'Administrative actions', value: (r) => r.actions.join(', ') || '–' }]} />`
    : html`<section class="panel"><h2>User ${self.user}</h2><p>Roles: ${self.roles.join(', ') || 'none'}. Administrative actions: ${self.actions.join(', ') || 'none'}.</p>
      <${Grants} grants=${self.grants} /><p class="dim">Other users are shown to users with the administrative action users.</p></section>`}
    <${Table} caption=${manages ? 'Tokens of all users' : 'Tokens'} rows=${tokens} columns=${[
      { title: 'Id', value: (t) => html`<code>${t.id}</code>` }, { title: 'User', value: (t) => t.user }, { title: 'Label', value: (t) => t.label || '–' },
      { title: 'Made by', value: (t) => (t.session ? 'login' : 'CreateToken') }, { title: 'Created', value: (t) => when(t.created, '–') },
      { title: 'Expires', value: (t) => when(t.expires, 'never') }, { title: 'Last used', value: (t) => when(t.lastUsed, 'never') },
      ...(changes ? [revoke] : [])]} />`;
}
