package auth

import "fmt"

// Range is keys of clients from Lower up to but not including Upper; an empty Upper is no bound. With Single it is the key
// Lower alone.
type Range struct {
	Lower, Upper []byte
	Single       bool
	Hidden       bool // the request does not name the keys: a refusal must not either
}

func (r *Range) String() string {
	switch {
	case r.Hidden:
		return "hidden keys"
	case r.Single:
		return fmt.Sprintf("key %q", r.Lower)
	case len(r.Upper) == 0:
		return fmt.Sprintf("the keys from %q on", r.Lower)
	}
	return fmt.Sprintf("the keys from %q to %q", r.Lower, r.Upper)
}

// Footprint is what a request may touch. It keeps the slices that it is given, and is reused with Reset. The zero Footprint
// touches nothing, which every user may.
type Footprint struct {
	ranges   [keyRights][]Range
	anyLease bool
	actions  Actions
}

// Reset empties the footprint and keeps its buffers.
func (f *Footprint) Reset() {
	for i := range f.ranges {
		clear(f.ranges[i]) // else it would keep messages alive
		f.ranges[i] = f.ranges[i][:0]
	}
	f.anyLease, f.actions = false, 0
}

// Key adds a key. The right is not RightAdmin, here and in Span, Add and Ranges.
func (f *Footprint) Key(right Right, key []byte) { f.Add(right, Range{Lower: key, Single: true}) }

// Span adds the keys from lower up to but not including upper, which is no bound if it is empty.
func (f *Footprint) Span(right Right, lower, upper []byte) {
	f.Add(right, Range{Lower: lower, Upper: upper})
}

// HiddenKey adds a key that the request does not name.
func (f *Footprint) HiddenKey(right Right, key []byte) {
	f.Add(right, Range{Lower: key, Single: true, Hidden: true})
}

// Add adds a range.
func (f *Footprint) Add(right Right, r Range) { f.ranges[right] = append(f.ranges[right], r) }

// AnyLease says that the request needs the lease right to some key, whichever: it makes a lease, or keeps one alive.
func (f *Footprint) AnyLease() { f.anyLease = true }

// Action adds administrative actions.
func (f *Footprint) Action(a Actions) { f.actions |= a }

// Ranges are the ranges of a right, in the order in which they were added.
func (f *Footprint) Ranges(right Right) []Range { return f.ranges[right] }

// Actions are the administrative actions.
func (f *Footprint) Actions() Actions { return f.actions }

// NeedsLease reports whether AnyLease was called.
func (f *Footprint) NeedsLease() bool { return f.anyLease }

// Everything adds all rights to all keys, and all actions.
func (f *Footprint) Everything() {
	for right := range f.ranges {
		f.Span(Right(right), nil, nil)
	}
	f.actions |= ActionsAll
}
