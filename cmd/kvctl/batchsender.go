package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

const (
	// batchesInFlight hides the latency of the server's disk and bounds what is in flight to 16 MiB or so.
	batchesInFlight = 16
	// stalledMax is how long an import goes on trying while no batch gets through: a restart with a long replay, or a checkpoint that
	// makes room.
	stalledMax = 30 * time.Second
	// stalledPause is the wait before the next attempt; the server's advice comes on top.
	stalledPause = 200 * time.Millisecond
)

// pendingBatch is a batch, the lines of its records, and its answer.
type pendingBatch struct {
	client.Batch
	file        string
	first, last int // lines

	// Written by the pipeline's goroutine; read once answered is closed.
	answered chan struct{}
	err      error
}

// batchSender writes batches in order over a pipeline. It does not give up when the server is overloaded, out of
// memory for a while, or restarted: it goes back to the first batch without an acknowledgement, and writes that
// one and all later ones again. Puts can be repeated, and the order stays, so the later of two records with the
// same key still wins.
type batchSender struct {
	ctx     context.Context // of the whole import
	client  *client.Client
	options []client.WriteOption

	pipeline *client.Pipeline
	window   []*pendingBatch // sent and not known to be applied, in order
	progress time.Time       // when a batch was last acknowledged, or the first one sent
	failed   error           // ends the import

	records, bytes int // acknowledged
}

func newBatchSender(ctx context.Context, c *client.Client, options []client.WriteOption) (*batchSender, error) {
	s := &batchSender{ctx: ctx, client: c, options: options, progress: time.Now()}
	return s, s.open()
}

// open begins a new pipeline. If that fails, the old one stays, which is closed.
func (s *batchSender) open() error {
	pipeline, err := s.client.Pipeline(s.ctx, client.PipelineOptions{InFlight: batchesInFlight})
	if err == nil {
		s.pipeline = pipeline
	}
	return err
}

// send writes a batch, after waiting for the oldest one if the window is full.
func (s *batchSender) send(b *pendingBatch) error {
	s.window = append(s.window, b)
	s.write(b)
	return s.complete(batchesInFlight - 1)
}

// close waits for all batches. It returns why the import failed, if it did.
func (s *batchSender) close() error {
	err := s.complete(0)
	_ = s.pipeline.Close() // every batch has its own error
	return err
}

// write puts a batch on the pipeline. That it fails is the batch's answer.
func (s *batchSender) write(b *pendingBatch) {
	answered := make(chan struct{})
	b.answered, b.err = answered, nil
	err := s.pipeline.Write(&b.Batch, func(_ client.Epoch, err error) {
		b.err = err
		close(answered)
	}, s.options...)
	if err != nil {
		b.err = err
		close(answered)
	}
}

// complete takes the answers of the oldest batches until at most left have none.
func (s *batchSender) complete(left int) error {
	for s.failed == nil && len(s.window) > left {
		oldest := s.window[0]
		<-oldest.answered
		if oldest.err != nil {
			s.failed = s.goBack(oldest)
			continue
		}
		s.records += oldest.Len()
		s.bytes += oldest.Bytes()
		s.window[0] = nil
		s.window = s.window[1:]
		s.progress = time.Now()
	}
	return s.failed
}

// goBack writes all batches of the window again, of which the oldest has failed. It fails if that would not help.
func (s *batchSender) goBack(oldest *pendingBatch) error {
	_ = s.pipeline.Close() // waits for the others: one that is still under way must not come after its own repetition
	for err := oldest.err; ; {
		advice, again := s.mayHelp(err)
		if !again || !s.pause(stalledPause+advice) {
			oldest.err = err
			return batchError(oldest)
		}
		if err = s.open(); err == nil {
			break
		}
	}
	for _, b := range s.window {
		s.write(b)
	}
	return nil
}

// mayHelp says whether to try again after err, and how long the server asks to wait.
func (s *batchSender) mayHelp(err error) (advice time.Duration, again bool) {
	var e *client.Error
	if !errors.As(err, &e) || !e.Retryable() || time.Since(s.progress) > stalledMax {
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
	var e *client.Error
	fate := "was not imported; later lines may have been"
	if errors.As(b.err, &e) && e.OutcomeUnknown() {
		fate = "may or may not have been imported, and later lines, too"
	}
	lines := fmt.Sprintf("lines %d to %d", b.first, b.last)
	if b.first == b.last {
		lines = fmt.Sprintf("line %d", b.first)
	}
	return fmt.Errorf("%s, %s: %w; that batch %s", b.file, lines, b.err, fate)
}
