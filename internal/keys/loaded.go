package keys

import "bytes"

// LoadedRange is what a bulk load has written: at one epoch, keys from Lower up to but not including Upper.
type LoadedRange struct {
	Epoch        Epoch
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

// WholeSpace is the range of a bulk load of which only the epoch and the space are known.
func WholeSpace(e Epoch, s Space) LoadedRange {
	return LoadedRange{Epoch: e, Lower: []byte{byte(s)}, Upper: []byte{byte(s) + 1}}
}
