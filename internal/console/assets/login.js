import { login } from './api.js';
import { html, Problem } from './ui.js';
import { useState } from './vendor/hooks.js';

// Login asks for a user's password, or for a token, and then calls done.
export function Login({ done }) {
  const [error, setError] = useState(null);
  const submit = async (e) => {
    e.preventDefault();
    const f = new FormData(e.target);
    try {
      await login({ user: f.get('user'), password: f.get('password'), token: f.get('token') });
      done();
    } catch (problem) { setError(problem); }
  };
  return html`<form class="bar" aria-label="Log in" onSubmit=${submit}>
    <label>User <input name="user" autocomplete="username" autofocus /></label>
    <label>Password <input name="password" type="password" autocomplete="current-password" /></label>
    <label>or a token <input name="token" type="password" autocomplete="off" /></label>
    <button>Log in</button></form><${Problem} error=${error} />`;
}
