package server

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/health"
)

// probe is the liveness probe: a write of the server itself that must become durable in time.
//
// A running probe has no deadline. The condition compares the duration of the running probe with
// its limit. So a call that does not return is detected, at most one probe runs, and health
// recovers at the moment at which the probe ends.
type probe struct {
	started atomic.Pointer[time.Time] // when the running probe began; nil: none is running
	failed  atomic.Pointer[error]     // the error of the last probe that ended
}

// probeIdleEvery is the number of intervals between two probes of an idle server. Each probe costs
// a record, a sync and a part of the next checkpoint, which an idle store should rarely do.
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
		if quiet := s.store.Visible() == visible && requests == 0 && s.conditions.probe.failed.Load() == nil; quiet && idle < probeIdleEvery-1 {
			idle++
			continue
		}
		idle = 0
		s.probeOnce(ctx)
		visible = s.store.Visible()
	}
}

func (s *Server) probeOnce(ctx context.Context) {
	began := time.Now()
	s.conditions.probe.started.Store(&began)
	err := s.store.Probe(ctx)
	switch {
	case ctx.Err() != nil:
		return // the server stops, and has not seen that the device answers
	case err != nil:
		s.conditions.probe.failed.Store(&err)
	default:
		s.conditions.probe.failed.Store(nil)
	}
	s.conditions.probe.started.Store(nil)
}

// probeConditions are the conditions that the probe shows at a time.
func (p *probe) conditions(now time.Time, timeout time.Duration) []health.Condition {
	c := health.Condition{Name: "probe-failing", Severity: health.Unavailable, Message: "a write of the server's own does not become durable"}
	if started := p.started.Load(); started != nil {
		if since := now.Sub(*started); since > timeout {
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
