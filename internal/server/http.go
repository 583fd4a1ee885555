package server

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/health"
)

// newHTTP serves metrics, health and profiles to operators. It is not the data plane: it may be
// slow, but a client that sends slowly cannot keep a connection open.
func newHTTP(s *Server, metrics http.Handler, log *slog.Logger) *http.Server {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answerHealth(w, s.observe(), nil) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answerHealth(w, s.observe(), s.ready()) })
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      2 * time.Minute, // a CPU profile takes as long as its request says
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}

// ready is nil unless the server is shutting down.
func (s *Server) ready() error {
	if s.drain.active.Load() {
		return errShuttingDown
	}
	return nil
}

// answerHealth answers 503 if err is not nil or a condition makes health checks fail. The body
// lists every condition.
func answerHealth(w http.ResponseWriter, found []health.Condition, err error) {
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
