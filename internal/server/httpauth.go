package server

import (
	"crypto/sha256"
	"errors"
	"net/http"
	"sync"
	"time"

	"google.golang.org/grpc/peer"

	"github.com/epochkv/epochkv/internal/auth"
)

// httpRights is what the paths of the HTTP listener need. A path that is not here is refused while users are checked.
var httpRights = map[string]auth.Actions{
	"GET /metrics":             auth.ActionObserve,
	"GET /debug/pprof/":        auth.ActionDebug,
	"GET /debug/pprof/cmdline": auth.ActionDebug,
	"GET /debug/pprof/profile": auth.ActionDebug,
	"GET /debug/pprof/symbol":  auth.ActionDebug,
	"POST /debug/pprof/symbol": auth.ActionDebug,
	"GET /debug/pprof/trace":   auth.ActionDebug,
	"GET /healthz":             0, // the details need ActionObserve
	"GET /readyz":              0,
}

// handle adds a path of the HTTP listener, with the check of its callers.
func (s *Server) handle(mux *http.ServeMux, pattern string, handler http.Handler) {
	actions, known := httpRights[pattern]
	if !known {
		actions = auth.ActionsAll
	}
	mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		if actions == 0 {
			handler.ServeHTTP(w, r)
			return
		}
		err := s.gate.checkHTTP(r, actions)
		s.auditRefusal(r.RemoteAddr, pattern, "", err)
		switch {
		case err == nil:
			handler.ServeHTTP(w, r)
		case errors.As(err, new(*auth.DeniedError)):
			http.Error(w, err.Error(), http.StatusForbidden)
		default:
			w.Header().Add("WWW-Authenticate", `Basic realm="EpochKV", charset="UTF-8"`)
			w.Header().Add("WWW-Authenticate", `Bearer realm="EpochKV"`)
			http.Error(w, err.Error(), http.StatusUnauthorized)
		}
	})
}

// detailed reports whether the sender of a request may see the conditions. The answer tells whether a password is right, so that a wrong one has a
// line in the audit log, although the request is not refused.
func (s *Server) detailed(r *http.Request) bool {
	err := s.gate.checkHTTP(r, auth.ActionObserve)
	if _, _, ok := r.BasicAuth(); ok && errors.Is(err, auth.ErrUnauthenticated) {
		s.auditRefusal(r.RemoteAddr, r.Pattern, "", err)
	}
	return err == nil
}

// checkHTTP is nil if the sender of a request may take the actions.
func (g *gate) checkHTTP(r *http.Request, actions auth.Actions) error {
	t := g.table.Load()
	if t == nil {
		return nil
	}
	var c *caller
	if user, password, ok := r.BasicAuth(); ok {
		c = g.basic(r, user, password, t)
	} else {
		c = g.authenticate(r.TLS, r.Header.Get("Authorization"), t.Table)
	}
	if c.err != nil {
		return c.err
	}
	var f auth.Footprint
	f.Action(actions)
	return c.user.Check(&f)
}

// basic authenticates the credentials that browsers send with each request: a password, or a token in its place.
func (g *gate) basic(r *http.Request, user, password string, t *numberedTable) *caller {
	c := &caller{}
	if c.identity, c.err = g.bearer("Bearer " + password); c.err == nil && c.identity.User != user {
		c.err = auth.ErrUnauthenticated
	}
	if errors.Is(c.err, auth.ErrUnauthenticated) && g.password != nil {
		c.identity, c.err = g.passwords.identify(g, r, user, password, t)
	}
	if c.err == nil {
		c.user, c.err = t.Verify(&c.identity, time.Now())
	}
	return c
}

// passwordCache has the passwords that were right lately, as hashes: to check one takes a tenth of a second of a processor, and a
// browser sends it with every request.
type passwordCache struct {
	mu    sync.Mutex
	right map[[sha256.Size]byte]rightPassword
}

type rightPassword struct {
	identity auth.Identity
	table    uint64 // its number: another table may have another password
	until    time.Time
}

const (
	passwordCacheMax  = 64
	passwordCacheTime = 5 * time.Minute
)

func (p *passwordCache) identify(g *gate, r *http.Request, user, password string, t *numberedTable) (auth.Identity, error) {
	key := sha256.Sum256([]byte(user + "\x00" + password))
	p.mu.Lock()
	found, ok := p.right[key]
	p.mu.Unlock()
	if ok && found.table == t.number && time.Now().Before(found.until) {
		return found.identity, nil
	}
	ctx := peer.NewContext(r.Context(), &peer.Peer{Addr: httpPeer(r)})
	id, err := g.password(ctx, user, password)
	if err != nil {
		return id, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.right) >= passwordCacheMax || p.right == nil {
		p.right = map[[sha256.Size]byte]rightPassword{}
	}
	p.right[key] = rightPassword{identity: id, table: t.number, until: time.Now().Add(passwordCacheTime)}
	return id, nil
}
