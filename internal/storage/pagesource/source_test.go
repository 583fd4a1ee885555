package pagesource

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// onePage is a source with the same bytes for every page.
type onePage struct{ bytes []byte }

func (s onePage) Page(page.ID, int) ([]byte, error) { return s.bytes, nil }

// TestSkippingRefusesSkippedPagesOnly: what a skipped page holds is never shown, and other pages are.
func TestSkippingRefusesSkippedPagesOnly(t *testing.T) {
	refused := errors.New("skipped")
	s := Skipping{Source: onePage{[]byte("bytes")}, Refuse: func(id page.ID) error {
		if id == 7 {
			return refused
		}
		return nil
	}}
	if p, err := s.Page(7, 0); p != nil || !errors.Is(err, refused) {
		t.Errorf("page 7: %q, %v", p, err)
	}
	if p, err := s.Page(8, 0); string(p) != "bytes" || err != nil {
		t.Errorf("page 8: %q, %v", p, err)
	}
}

// engineState is what a prefetcher sees of an engine.
type engineState struct {
	merging    bool
	checkpoint uint64
}

func (s *engineState) Merging() bool      { return s.merging }
func (s *engineState) Checkpoint() uint64 { return s.checkpoint }

// TestPrefetcherReadsOnlyTheStateInUse: it yields to a merge, and does not read pages of a state that was replaced, whose
// ids may name other pages by now. Whenever it does not read it does not keep memory from being reused either.
func TestPrefetcherReadsOnlyTheStateInUse(t *testing.T) {
	registry := pin.NewRegistry(new(atomic.Uint64))
	state := &engineState{checkpoint: 3}
	p := &Prefetcher{state: state, slot: registry.Slot()}
	inGuard := func() bool { tick := registry.Retire(); return registry.OldestTick() <= tick }
	for _, c := range []struct {
		name    string
		merging bool
		asked   uint64
		want    bool
	}{{"in use", false, 3, true}, {"merging", true, 3, false}, {"replaced", false, 2, false}} {
		state.merging = c.merging
		if got := p.Enter(c.asked); got != c.want || inGuard() != c.want {
			t.Errorf("%s: enters %v, in the guard %v", c.name, got, inGuard())
		}
		if c.want {
			p.Leave()
		}
	}
	if inGuard() {
		t.Error("the guard was not left")
	}
}

// TestReadaheadOfANewScanBeginsSmall: what an earlier scan needed says nothing about the next one.
func TestReadaheadOfANewScanBeginsSmall(t *testing.T) {
	r := Readahead{next: 9, length: siblingsMax}
	if r.Restart(); r != (Readahead{length: readaheadMin}) {
		t.Errorf("after Restart: %+v", r)
	}
	if r.Expect(5); r.next != 5 || r.length != readaheadMin {
		t.Errorf("after Expect: %+v", r)
	}
}
