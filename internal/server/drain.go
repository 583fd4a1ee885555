package server

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// drain is the state of a server that stops.
type drain struct {
	active atomic.Bool
	begun  chan struct{}   // closed when draining begins, after active is set
	cutOff <-chan struct{} // closed to end draining early; nil: only its timeout ends it
	reload <-chan struct{} // asks for a reload of the certificates

	// What uses the store, and has ended before it is closed.
	console    consoleCalls
	receivers  sync.WaitGroup // goroutines of streams, which end after their handlers
	background sync.WaitGroup // the probe and the leases, which end with Run's context

	requests   context.Context // ends when no request is left: for what they wait for. Constant after Open
	noRequests context.CancelFunc
}

func (d *drain) init() {
	d.begun = make(chan struct{})
	d.requests, d.noRequests = context.WithCancel(context.Background())
	d.console.init()
}

// shutDown drains the server: health reports it first, then the requests end. Requests that do not
// end in time are cut off. The store is closed, or left open if its device does not answer.
// shutDown takes at most the drain timeout, the close timeout and a second, two more if the receiver of traces does not answer, and
// one and a half if the device of the audit log does not.
func (s *Server) shutDown() error {
	s.log.Info("draining", "timeout", s.config.DrainTimeout, "close_timeout", s.config.CloseTimeout)
	notifySupervisor(s.log.Logger, daemon.SdNotifyStopping)
	s.endpoints.health.Shutdown()
	s.drain.active.Store(true)
	s.store.StopThrottling()
	close(s.drain.begun)
	err := s.closeStore(s.drainRequests())
	if s.endpoints.http != nil { // last, so that metrics and health can be read while the server drains
		err = errors.Join(err, endHTTP(s.endpoints.http, time.Second))
	}
	s.closeTraces()
	err = errors.Join(err, s.observer.audit.close())
	s.log.Info("stopped")
	return err
}

// endHTTP ends the server of metrics and health, for so long at most. It closes its connections one after the other, and
// each that uses TLS may take five seconds for its last alert if the client takes nothing: the process ends before that.
func endHTTP(h *http.Server, most time.Duration) error {
	ended := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), most/2)
		defer cancel()
		err := h.Shutdown(ctx)
		if err != nil {
			err = h.Close()
		}
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-time.After(most):
		return nil
	}
}

// drainRequests returns when all requests have ended or have been cut off. A request that waits for
// the device may end later: the channel is closed when the last request has ended.
func (s *Server) drainRequests() <-chan struct{} {
	drained := make(chan struct{})
	ctx, stop := context.WithCancel(context.Background())
	go func() {
		defer close(drained)
		defer stop()
		defer s.drain.console.drain(ctx) // last: an operator may look at what still runs
		if s.endpoints.grpc == nil {
			s.direct.drain(ctx)
			return
		}
		if h := s.endpoints.tls.grpc; h != nil {
			h.Close()
		}
		s.endpoints.grpc.GracefulStop()
	}()
	cut := ""
	select {
	case <-drained:
	case <-time.After(s.config.DrainTimeout):
		cut = "the drain timeout passed"
	case <-s.drain.cutOff:
		cut = "a second signal"
	}
	if cut != "" {
		s.log.Warn("cutting off what still runs", "cause", cut)
		stop()
		if s.endpoints.grpc != nil {
			go s.endpoints.grpc.Stop()
		}
	}
	return drained
}

// closeStore closes the store after the last request has ended. After the close timeout it gives up
// with *mvcc.StuckError; calls that have not returned then continue until the process ends.
func (s *Server) closeStore(drained <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.config.CloseTimeout)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		<-drained
		s.drain.receivers.Wait()
		s.drain.noRequests()
		s.feed.stopArchive() // it uploads what the last requests have written
		s.drain.background.Wait()
		s.feed.feed.Close()
		err := s.store.Shutdown(ctx)
		if stuck := (*mvcc.StuckError)(nil); !errors.As(err, &stuck) {
			err = errors.Join(err, s.closeFiles())
		}
		ended <- err
	}()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = s.store.Stuck()
	}
	if stuck := (*mvcc.StuckError)(nil); errors.As(err, &stuck) {
		s.log.Error("the device does not answer; ending without closing the store", "waiting_for", stuck.Step,
			"durable_epoch", uint64(stuck.Durable), "visible_epoch", uint64(stuck.Visible))
	}
	return err
}
