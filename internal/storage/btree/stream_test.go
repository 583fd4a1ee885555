package btree

import (
	"context"
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/testseed"
)

// TestOneLeafMayTakeAnyAmountOfInput: what a merge has in memory does not grow with the input of one leaf, or of one key, whatever divides the
// merge. Cuts do not divide a merge with avoided pages, and the first merge into a tree has no leaf. When it is cancelled, the merge
// ends within the leaf, also if nothing of the input is left.
func TestOneLeafMayTakeAnyAmountOfInput(t *testing.T) {
	testseed.SkipUnderRace(t)
	const total, most = 50000, 1000
	old := newStore(512)
	tree := old.apply(t, old.mergeInput(Root{}, numbered(0, 200, 1, 12), allVisible)).Root
	children, err := readChildren(old, page.Child{Separator: page.Separator{Trailer: page.NoTrailer}, ID: tree.ID}, tree.Level)
	if err != nil || tree.Level != 1 {
		t.Fatalf("the root has %d children, at level %d: %v", len(children), tree.Level, err)
	}
	input, versions := numbered(1000, total, 2, 40), make([]Entry, total)
	for i := range versions {
		versions[i] = set("key00000100", keys.Epoch(total+1-i), "one of many")
	}
	for name, test := range map[string]struct {
		base   Root
		avoid  Avoided
		input  []Entry
		policy Policy
	}{
		"empty tree":   {input: input, policy: allVisible},
		"avoided page": {tree, Avoided{children[0].ID: &children[1].Separator}, input, allVisible},
		"one key":      {tree, nil, versions, Policy{MinVisible: 1, Snapshots: []keys.Epoch{1}}},
		"deletions":    {input: deletes(input, 2), policy: allVisible},
	} {
		t.Run(name, func(t *testing.T) {
			merge := func(cancelAt int) (*flow, error) {
				s := old.clone()
				if test.base.Empty() {
					s = newStore(512)
				}
				in := s.mergeInput(test.base, test.input, test.policy)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				f := &flow{Sink: s, cancelAt: cancelAt, cancel: cancel}
				input := in.Input
				in.Sink, in.Avoid, in.Input = f, test.avoid, func() Input { return &flowInput{input(), f} }
				_, err := Merge(ctx, in)
				return f, err
			}
			if f, err := merge(-1); err != nil || f.most > most && name != "deletions" || f.taken < total {
				t.Errorf("of %d entries up to %d were in no page yet: %v", f.taken, f.most, err)
			}
			if f, err := merge(total / 2); !errors.Is(err, context.Canceled) || f.taken > total/2+most {
				t.Errorf("a merge that was cancelled after %d entries took %d: %v", total/2, f.taken, err)
			}
		})
	}
}

// flow counts what a merge has taken from its input, and written.
type flow struct {
	Sink
	taken, written, most int
	cancelAt             int
	cancel               func()
}

// WritePage implements Sink.
func (f *flow) WritePage(id page.ID, p []byte) error {
	if page.IsTree(p, 0) {
		f.written += page.Leaf(p).Count()
	}
	return f.Sink.WritePage(id, p)
}

// flowInput is the input of a flow.
type flowInput struct {
	Input
	flow *flow
}

// Next implements Input.
func (i *flowInput) Next(e *Entry) bool {
	f := i.flow
	f.taken++
	if f.most = max(f.most, f.taken-f.written); f.taken == f.cancelAt {
		f.cancel()
	}
	return i.Input.Next(e)
}
