package server

import "github.com/epochkv/epochkv/internal/auth"

// footprint is what a request may touch. It is compared with the rights in parts, so that a request with many keys needs no
// memory for them.
type footprint struct {
	parts auth.Footprint
	count int
	user  *auth.User
	err   error

	collect func(auth.Right, auth.Range) // instead of comparing; nil: compare
}

// footprintPart is how many ranges are compared at once.
const footprintPart = 64

func (f *footprint) begin(u *auth.User) {
	f.parts.Reset()
	f.count, f.user, f.err = 0, u, nil
}

// end is nil if the user has all rights that were added since begin.
func (f *footprint) end() error {
	f.compare()
	err := f.err
	f.user, f.err = nil, nil
	return err
}

func (f *footprint) compare() {
	if f.err == nil {
		f.err = f.user.Check(&f.parts)
	}
	f.parts.Reset()
	f.count = 0
}

func (f *footprint) add(right auth.Right, r auth.Range) {
	if f.collect != nil {
		f.collect(right, r)
		return
	}
	if f.err != nil {
		return
	}
	f.parts.Add(right, r)
	if f.count++; f.count == footprintPart {
		f.compare()
	}
}

func (f *footprint) key(right auth.Right, key []byte) {
	f.add(right, auth.Range{Lower: key, Single: true})
}
