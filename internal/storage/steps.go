package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// A merge writes every page that it changes to a new location, and frees the old location only when the new state is durable.
// A memtable of small deletions can affect as many leaves as it has versions, and so need more pages than a full disk has
// free. Such a merge is made in steps: each merges the versions of one span of keys, commits a superblock, and frees the
// replaced pages for the next step. A step needs few pages, however large the memtables are.
//
// Invariants:
//   - until the last step the epoch of the state does not change, the memtables stay in the view, and the log stays on the
//     disk. Versions that a step has merged are in the memtables and in the log, too: a reader finds them there first, and
//     a later merge, after a restart or in the next attempt, replaces each version by itself;
//   - no merge adds pages to the tree unless floorPages stay free, so that a deletion can always be merged.

// stepShare limits the keys of a step to 1/stepShare of the number of free pages at first: each key may be in a leaf of its
// own, and the nodes above the leaves are rewritten as well.
const stepShare = 4

// graceMax is how long a step waits for readers of the pages that the step before replaced.
const graceMax = time.Second

// keySpan is the range of keys that a step merges: [lower, upper), without a bound if upper is nil.
type keySpan struct{ lower, upper []byte }

// has reports whether a key is in the span; everything is in nil, which is a whole merge.
func (span *keySpan) has(key []byte) bool {
	return span == nil || bytes.Compare(span.lower, key) <= 0 && (span.upper == nil || bytes.Compare(key, span.upper) < 0)
}

// spanInput is the part of an input in a span.
type spanInput struct {
	btree.Input
	span *keySpan
}

func newSpanInput(in btree.Input, span *keySpan) btree.Input {
	s := spanInput{in, span}
	s.SeekGE(nil)
	return s
}

// SeekGE implements btree.Input.
func (s spanInput) SeekGE(key []byte) {
	if bytes.Compare(key, s.span.lower) < 0 {
		key = s.span.lower
	}
	s.Input.SeekGE(key)
}

// Next implements btree.Input.
func (s spanInput) Next(e *btree.Entry) bool {
	return s.Input.Next(e) && (s.span.upper == nil || bytes.Compare(e.Key, s.span.upper) < 0)
}

// within limits a merge to the span of a step. It needs as few pages as possible: one worker, and no cuts but those of the
// tree, because a leaf that is cut is rewritten even if no version changes it.
func (span *keySpan) within(in *btree.MergeInput) {
	input := in.Input
	in.Input = func() btree.Input { return newSpanInput(input(), span) }
	in.Lookahead, in.Cuts, in.Workers, in.Progress = in.Input, btree.Cuts{}, nil, nil
}

// stepper merges generations in steps.
type stepper struct {
	engine *Engine
	job    mergeJob
	cut    keys.Epoch
	halved int   // how often a step had to be halved
	failed error // why a span was left out, or nil
}

// mergeInSteps merges generations for which the free pages do not suffice at once, and returns them: the oldest one, so that
// its log segment is recycled soon; or, if that does not fit, all, because a newer one may delete keys of the oldest.
func (e *Engine) mergeInSteps(ctx context.Context, complete []*generation, h *GCWatermarks) (merged []*generation, err error) {
	e.checkpoints.merging.Store(true)
	defer e.checkpoints.merging.Store(false)
	merged = complete[len(complete)-1:]
	err = e.mergeBySpans(ctx, mergeJob{immutables: merged, watermarks: *h})
	if doesNotFit(err) && len(complete) > 1 {
		merged = complete
		err = e.mergeBySpans(ctx, mergeJob{immutables: merged, watermarks: *h})
	}
	if err != nil {
		e.throttleFail()
	}
	return merged, err
}

// mergeBySpans merges the generations of a job. Spans that do not fit are left out, and the others merged nevertheless:
// deletions free pages. If a span was left out the generations stay, and the error says why.
func (e *Engine) mergeBySpans(ctx context.Context, job mergeJob) error {
	s := stepper{engine: e, job: job, cut: job.cut(0)}
	return s.run(ctx)
}

// run makes step after step until the last key.
func (s *stepper) run(ctx context.Context) error {
	if err := s.engine.log.WaitDurable(ctx, s.cut); err != nil {
		return err
	}
	for lower, more := []byte(nil), true; more; {
		span, deletes := s.next(lower)
		err := s.step(ctx, span)
		if doesNotFit(err) {
			if (deletes || !errors.Is(err, pager.ErrKept)) && s.halve() {
				continue
			}
			s.failed, err = err, nil
		} else {
			s.halved = max(s.halved-1, 0)
		}
		if err != nil {
			return err
		}
		lower, more = span.upper, span.upper != nil
	}
	if s.failed != nil {
		return fmt.Errorf("in steps: %w", s.failed)
	}
	return nil
}

// halve makes steps smaller, and reports false if they are as small as possible.
func (s *stepper) halve() bool {
	if s.size() == 1 {
		return false
	}
	s.halved++
	return true
}

// size is how many keys a step should have. Values count as one key for each page of their size.
func (s *stepper) size() int {
	p := s.engine.pager
	free, _ := p.FreeBytes()
	return max(1, int(free/int64(p.PageSize()))/stepShare>>s.halved)
}

// next returns the span of the next step, and whether it has deletions.
func (s *stepper) next(lower []byte) (span *keySpan, deletes bool) {
	in, left := newMemInput(s.job.immutables), s.size()
	in.SeekGE(lower)
	span = &keySpan{lower: lower}
	var key []byte
	for e := (btree.Entry{}); in.Next(&e); {
		if !bytes.Equal(e.Key, key) {
			if left <= 0 {
				span.upper = bytes.Clone(e.Key)
				break
			}
			key = e.Key
			left--
		}
		left -= len(e.Value) / s.engine.pager.PageSize()
		deletes = deletes || e.Trailer.Kind() == keys.KindDelete
	}
	return span, deletes
}

// step merges a span. The last one ends the merge, if no span was left out.
func (s *stepper) step(ctx context.Context, span *keySpan) error {
	e := s.engine
	if err := e.awaitReaders(ctx); err != nil {
		return err
	}
	job, merged, epoch := s.job, s.job.immutables, s.cut
	job.span = span
	if span.upper != nil || s.failed != nil {
		merged, epoch = nil, e.pager.State().Epoch
	}
	number, result, err := e.mergeTree(ctx, e.view.Load().root, &job, epoch)
	if err != nil {
		return err
	}
	e.readDeadVersionRatio(result.Root)
	return e.publishAndShrink(number, result.Root, merged, epoch)
}

// awaitReaders returns when the pages that checkpoints replaced are free, or after graceMax. Readers leave their guard every
// few leaves.
func (e *Engine) awaitReaders(ctx context.Context) error {
	for wait := 50 * time.Microsecond; e.memory.retired.any() && wait < graceMax; wait *= 2 {
		e.Reclaim()
		if !e.memory.retired.any() {
			break
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return e.shrinkFile()
}

// floorBytes is how much of the data file stays free when a merge adds pages to the tree: a quarter of the reserve, many times what the smallest
// step takes.
func (e *Engine) floorBytes() int64 {
	if !e.reserve.enabled {
		return 0
	}
	return e.options.pagesReserve() / 4
}
