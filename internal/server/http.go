package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/console"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/transport"
)

// newHTTP serves metrics, health, profiles and the console to operators. It is not the data plane: it may be
// slow, but a client that sends slowly cannot keep a connection open.
func newHTTP(s *Server, metrics http.Handler, log *slog.Logger) *http.Server {
	mux := http.NewServeMux()
	s.handle(mux, "GET /metrics", metrics)
	if pages := s.newConsole(); pages != nil { // its calls are checked one by one
		mux.Handle(console.Root, pages)
		mux.Handle("GET /{$}", http.RedirectHandler(console.Root, http.StatusFound))
	}
	s.handle(mux, "GET /healthz", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { answerHealth(w, s.observe(), nil, s.detailed(r)) }))
	s.handle(mux, "GET /readyz", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { answerHealth(w, s.observe(), s.ready(), s.detailed(r)) }))
	s.handle(mux, "GET /debug/pprof/", http.HandlerFunc(s.endpoints.profiles.index))
	s.handle(mux, "GET /debug/pprof/cmdline", http.HandlerFunc(pprof.Cmdline))
	s.handle(mux, "GET /debug/pprof/profile", http.HandlerFunc(pprof.Profile))
	s.handle(mux, "GET /debug/pprof/symbol", http.HandlerFunc(s.endpoints.profiles.symbol))
	s.handle(mux, "POST /debug/pprof/symbol", http.HandlerFunc(s.endpoints.profiles.symbol))
	s.handle(mux, "GET /debug/pprof/trace", http.HandlerFunc(s.endpoints.profiles.trace))
	return &http.Server{
		ConnState: s.endpoints.httpConns.changed,
		Handler:   endOld(mux, s.config.TLS.MaxConnectionAge),
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context {
			return context.WithValue(ctx, connectedKey{}, time.Now())
		},
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       httpReadTime,
		WriteTimeout:      2 * time.Minute, // a CPU profile takes as long as its request says
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}

// httpReadTime bounds the time in which an HTTP request must come.
const httpReadTime = 10 * time.Second

// enterScrape waits for the turn of a client to read the counters.
func (s *Server) enterScrape(r *http.Request) (leave func(), err error) {
	return s.endpoints.scrapes.enter(r.Context(), transport.NetworkOf(httpPeer(r)).String())
}

// connectedKey is where the context of an HTTP request has the time at which its connection began.
type connectedKey struct{}

// endOld closes connections from an age on, after the answer at hand.
func endOld(next http.Handler, age time.Duration) http.Handler {
	if age == 0 {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if began, ok := r.Context().Value(connectedKey{}).(time.Time); ok && time.Since(began) >= age {
			w.Header().Set("Connection", "close")
		}
		next.ServeHTTP(w, r)
	})
}

// ready is nil unless the server is shutting down.
func (s *Server) ready() error {
	if s.drain.active.Load() {
		return errShuttingDown
	}
	return nil
}

// answerHealth answers 503 if err is not nil or a condition makes health checks fail. With details, the
// body lists every condition.
func answerHealth(w http.ResponseWriter, found []health.Condition, err error, details bool) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	var body strings.Builder
	if err == nil && unavailable(found) == nil {
		body.WriteString("ok\n")
	} else {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	if err != nil {
		fmt.Fprintln(&body, err)
	}
	if !details {
		found = nil
	}
	for _, c := range found {
		fmt.Fprintf(&body, "%v: %s: %s\n", c.Severity, c.Name, c.Text())
	}
	_, _ = io.WriteString(w, body.String()) // an error here means that the client has disconnected
}

// serveHTTP serves until h is shut down.
func serveHTTP(h *http.Server, l net.Listener) error {
	if err := h.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", l.Addr(), err)
	}
	return nil
}
