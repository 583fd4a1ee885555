package server

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/health"
)

// probe is the liveness probe: a write of the server's own that has to become durable in time.
//
// A probe under way has no deadline of its own: the condition looks at how long it has been, so
// that a call that does not return shows as well, no second probe joins the first, and health
// recovers in the moment in which the first one ends.
type probe struct {
	started atomic.Int64          // unix nanoseconds at which the probe under way began; 0: none is
	failed  atomic.Pointer[error] // of the last probe that ended
}

// probeIdleEvery is how many intervals pass between two probes of a server that does nothing. An
// idle store must rest: each probe is a record and a sync, and something for the next checkpoint.
const probeIdleEvery = 12

// runProbe probes at an interval until ctx ends.
func (s *Server) runProbe(ctx context.Context) {
	tick := time.NewTicker(s.config.ProbeInterval)
	defer tick.Stop()
	visible, idle := s.store.Visible(), 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		requests, _, _ := s.admission.inflight()
		if quiet := s.store.Visible() == visible && requests == 0 && s.probe.failed.Load() == nil; quiet && idle < probeIdleEvery-1 {
			idle++
			continue
		}
		idle = 0
		s.probeOnce(ctx)
		visible = s.store.Visible()
	}
}

func (s *Server) probeOnce(ctx context.Context) {
	s.probe.started.Store(time.Now().UnixNano())
	err := s.store.Probe(ctx)
	switch {
	case ctx.Err() != nil: // the server stops
	case err != nil:
		s.probe.failed.Store(&err)
	default:
		s.probe.failed.Store(nil)
	}
	s.probe.started.Store(0)
}

// probeConditions are what the probe shows at now.
func (p *probe) conditions(now time.Time, timeout time.Duration) []health.Condition {
	c := health.Condition{Name: "probe-failing", Severity: health.Unavailable, Message: "a write of the server's own does not become durable"}
	if started := p.started.Load(); started != 0 {
		if since := now.Sub(time.Unix(0, started)); since > timeout {
			c.Cause = fmt.Sprintf("it has been under way for %v", since.Round(time.Second))
			return []health.Condition{c}
		}
	}
	if err := p.failed.Load(); err != nil {
		c.Cause = (*err).Error()
		return []health.Condition{c}
	}
	return nil
}
