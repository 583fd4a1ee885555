package keys

import "bytes"

// LoadedRange is what a bulk load has written: at one epoch, keys from Lower up to but not including Upper.
type LoadedRange struct {
	Epoch        Epoch
	First        Epoch  // of several bulk loads of which only the last epoch is known, the first one; else zero
	Lower, Upper []byte // internal keys; Upper is nil without a bound
	Keys         uint64 // zero: unknown, and the bounds are those of all keys that it could have written
}

// Add extends the bounds to an internal key.
func (r *LoadedRange) Add(key []byte) {
	if r.Lower == nil || bytes.Compare(key, r.Lower) < 0 {
		r.Lower = append(r.Lower[:0], key...)
	}
	if n := len(r.Upper); n == 0 || bytes.Compare(key, r.Upper[:n-1]) > 0 {
		r.Upper = append(append(r.Upper[:0], key...), 0) // the smallest key after it
	}
}

// Since is the epoch before the bulk load, or before the first one of several.
func (r *LoadedRange) Since() Epoch {
	if r.First != 0 {
		return r.First - 1
	}
	return r.Epoch - 1
}

// WholeSpace is the range of bulk loads of which only the epochs and the space are known.
func WholeSpace(first, last Epoch, s Space) LoadedRange {
	return LoadedRange{First: first, Epoch: last, Lower: []byte{byte(s)}, Upper: []byte{byte(s) + 1}}
}

// HeldLoad is a bulk load whose versions are kept until the log archive has them: the log has no record of it.
type HeldLoad struct {
	After Epoch // the newest commit before it
	Epoch Epoch
	Term  Term
	Time  uint64 // of its commit, microseconds since 1970
}
