package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

const (
	// batchesInFlight hides the latency of the server's disk and bounds what is in flight to 16 MiB or so.
	batchesInFlight = 16
	// stalledPause is the wait before the next attempt; the server's advice comes on top.
	stalledPause = 200 * time.Millisecond
)

// stalledMax is how long an import goes on trying while no batch gets through: a restart with a long replay, or a checkpoint that makes
// room. Tests change it.
var stalledMax = 30 * time.Second

// pendingBatch is a batch, the lines of its records, and its answer.
type pendingBatch struct {
	records      []record // without those that a later batch has replaced
	count, bytes int      // of all
	file         string
	first, last  int // lines

	id client.RequestID // of its last attempt

	// Written by the pipeline's goroutine; read once answered is closed.
	answered chan struct{}
	err      error // nil: it was executed
	unknown  bool  // whether it was executed
}

func (b *pendingBatch) add(r *record) {
	b.records = append(b.records, *r)
	b.count++
	b.bytes += len(r.key) + len(r.value)
}

// batchSender writes batches in order over a pipeline. It does not give up when the server is overloaded, out of
// memory for a while, or restarted: it goes back to the first batch that was not executed, and writes that one and
// all later ones that were not executed again, each under a new request id.
//
// Invariant: an attempt is made when all earlier attempts of its batch are known to be not executed, now and later. A
// connection may die without the server noticing, and what waits in it would be executed after its repetition, and
// overwrite later records and later writes of others; a fence for its id (client.Outcome) prevents that.
//
// The later of two records with the same key wins: a record is left out of an attempt if a later batch, which was
// executed, has its key.
type batchSender struct {
	ctx     context.Context // of the whole import
	client  *client.Client
	options []client.WriteOption

	pipeline *client.Pipeline
	cut      context.CancelFunc // breaks the pipeline
	stalled  atomic.Bool        // it was broken because nothing got through
	window   []*pendingBatch    // sent and not known to be applied, in order
	progress time.Time          // when a batch was last acknowledged, or the first one sent
	failed   error              // ends the import

	records, bytes int // acknowledged
}

func newBatchSender(ctx context.Context, c *client.Client, options []client.WriteOption) (*batchSender, error) {
	s := &batchSender{ctx: ctx, client: c, options: options, progress: time.Now()}
	return s, s.open()
}

// open begins a new pipeline. If that fails, the old one stays, which is closed.
func (s *batchSender) open() error {
	ctx, cut := context.WithCancel(s.ctx)
	pipeline, err := s.client.Pipeline(ctx, client.PipelineOptions{InFlight: batchesInFlight})
	if err != nil {
		cut()
		return err
	}
	s.pipeline, s.cut = pipeline, cut
	return nil
}

// within does what waits for one batch to get through, and breaks the pipeline if that takes too long: a server may take batches, and answer none.
func (s *batchSender) within(do func()) {
	cut := s.cut
	timer := time.AfterFunc(stalledMax, func() {
		s.stalled.Store(true)
		cut()
	})
	defer timer.Stop()
	do()
}

// send writes a batch, after waiting for the oldest one if the window is full.
func (s *batchSender) send(b *pendingBatch) error {
	if len(s.window) == 0 {
		s.progress = time.Now() // the input may have been slow
	}
	s.window = append(s.window, b)
	s.within(func() { s.write(b) })
	return s.complete(batchesInFlight - 1)
}

// close waits for all batches. It returns why the import failed, if it did.
func (s *batchSender) close() error {
	err := s.complete(0)
	s.within(func() { _ = s.pipeline.Close() }) // every batch has its own error
	s.cut()
	return err
}

// write puts a batch on the pipeline. That it fails is the batch's answer.
func (s *batchSender) write(b *pendingBatch) {
	answered := make(chan struct{})
	b.answered, b.err, b.unknown, b.id = answered, nil, false, s.client.NewRequestID()
	if len(b.records) == 0 { // later batches have replaced all of them
		close(answered)
		return
	}
	var batch client.Batch
	for i := range b.records {
		r := &b.records[i]
		batch.PutExpiring(r.key, r.value, r.lifetime())
	}
	err := s.pipeline.Write(&batch, func(_ client.Epoch, err error) {
		b.err = err
		close(answered)
	}, append(slices.Clone(s.options), client.As(b.id))...)
	if err != nil {
		b.err = err
		close(answered)
	}
}

// complete takes the answers of the oldest batches until at most left have none.
func (s *batchSender) complete(left int) error {
	for s.failed == nil && len(s.window) > left {
		oldest := s.window[0]
		s.within(func() { <-oldest.answered })
		if oldest.err != nil {
			s.failed = s.goBack(oldest)
			continue
		}
		s.records += oldest.count
		s.bytes += oldest.bytes
		s.window[0] = nil
		s.window = s.window[1:]
		s.progress = time.Now()
	}
	return s.failed
}

// goBack writes the batches of the window that were not executed again; the oldest one is one of them. It fails if that
// would not help.
func (s *batchSender) goBack(oldest *pendingBatch) error {
	for _, b := range s.window {
		s.within(func() { <-b.answered })
	}
	s.within(func() { _ = s.pipeline.Close() })
	s.cut()
	if s.stalled.Load() {
		oldest.err = errStalled
		return batchError(oldest)
	}
	for _, b := range s.window {
		b.unknown = attemptLost(b.err)
	}
	for err := oldest.err; ; {
		advice, again := s.mayHelp(err)
		if !again || !s.pause(stalledPause+advice) {
			oldest.err = err
			return batchError(oldest)
		}
		if err = s.findOutcomes(); err == nil {
			err = s.open()
		}
		if err == nil {
			break
		}
	}
	s.leaveOutReplaced()
	for _, b := range s.window {
		if b.err != nil {
			s.within(func() { s.write(b) })
		}
	}
	return nil
}

// errStalled ends an import to a server that takes batches and answers none.
var errStalled = &client.Error{Code: codes.DeadlineExceeded, Message: "the server has acknowledged nothing for 30 s"}

// attemptLost says whether an attempt may have been executed, or may be later. A refused time is no such error: no other
// attempt had the id.
func attemptLost(err error) bool {
	e, failed := errors.AsType[*client.Error](err)
	return failed && e.OutcomeUnknown() && !refusedTime(e)
}

func refusedTime(e *client.Error) bool {
	return e.Reason == kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_EXPIRED || e.Reason == kvpb.ErrorReason_ERROR_REASON_REQUEST_ID_IN_FUTURE
}

// errBatchForgotten ends an import that was interrupted for longer than the server knows its requests.
var errBatchForgotten = errors.New("the server does not know any more what became of the batch")

// findOutcomes finds out which batches were executed. Those that were not cannot be any more then.
func (s *batchSender) findOutcomes() error {
	for _, b := range s.window {
		if !b.unknown {
			continue
		}
		switch state, _, err := s.client.Outcome(s.ctx, b.id, true); {
		case err != nil:
			return err
		case state == client.Applied:
			b.err, b.unknown = nil, false
		case state == client.Cancelled:
			b.unknown = false
		default:
			return errBatchForgotten
		}
	}
	return nil
}

// leaveOutReplaced leaves out records with the key of a later batch that was executed.
func (s *batchSender) leaveOutReplaced() {
	executed := map[string]struct{}{}
	for _, b := range slices.Backward(s.window) {
		if b.err == nil {
			for _, r := range b.records {
				executed[string(r.key)] = struct{}{}
			}
			continue
		}
		b.records = slices.DeleteFunc(b.records, func(r record) bool {
			_, replaced := executed[string(r.key)]
			return replaced
		})
	}
}

// mayHelp says whether to try again after err, and how long the server asks to wait.
func (s *batchSender) mayHelp(err error) (advice time.Duration, again bool) {
	var e *client.Error
	if !errors.As(err, &e) || !e.Retryable() && !refusedTime(e) || time.Since(s.progress) > stalledMax {
		return 0, false
	}
	// Only an operator can free a full disk.
	return e.RetryAfter, e.Reason != kvpb.ErrorReason_ERROR_REASON_DISK_FULL
}

// pause waits. It is false if the import ends first.
func (s *batchSender) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-s.ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

func batchError(b *pendingBatch) error {
	fate := "was not imported; later lines may have been"
	if b.unknown || attemptLost(b.err) {
		fate = "may or may not have been imported, and later lines, too"
	}
	lines := fmt.Sprintf("lines %d to %d", b.first, b.last)
	if b.first == b.last {
		lines = fmt.Sprintf("line %d", b.first)
	}
	return fmt.Errorf("%s, %s: %w; that batch %s", b.file, lines, b.err, fate)
}
