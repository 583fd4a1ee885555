package metadata

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

func TestSectionsKeepTheirFields(t *testing.T) {
	value := func(rng *rand.Rand) uint64 {
		if rng.IntN(3) == 0 {
			return 0
		}
		return rng.Uint64() >> rng.IntN(64)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for range 1000 {
		f := Fields{value(rng), value(rng), value(rng), value(rng), value(rng), value(rng)}
		stored := append(f.Append([]byte("before"))[len("before"):], "value"...)
		got, err := Read(keys.KindSetMetadata, stored)
		if err != nil || got != f || string(Value(keys.KindSetMetadata, stored)) != "value" {
			t.Fatalf("%+v, %v, value %q; want %+v", got, err, Value(keys.KindSetMetadata, stored), f)
		}
	}
}

func TestLongestSectionFits(t *testing.T) {
	f := Fields{math.MaxUint64, math.MaxUint64, math.MaxUint64, math.MaxUint64, math.MaxUint64, math.MaxUint64}
	if n := len(f.Append(nil)); n > SectionBytesMax {
		t.Fatalf("%d bytes, the limit is %d", n, SectionBytesMax)
	}
}

func TestVersionWithoutMetadataIsAllValue(t *testing.T) {
	stored := []byte{200, 1}
	f, err := Read(keys.KindSet, stored)
	if err != nil || f != (Fields{}) || len(Value(keys.KindSet, stored)) != 2 || Check(keys.KindDelete, nil) != nil {
		t.Fatalf("%+v, %v", f, err)
	}
}

func TestSectionsThatCannotBeReadAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		stored []byte
		want   error
	}{
		"nothing":       {nil, ErrMalformed},
		"cut":           {[]byte{3, 1, 5}, ErrMalformed},
		"too long":      {append([]byte{SectionBytesMax}, make([]byte, 200)...), ErrMalformed},
		"no value":      {[]byte{1, 1}, ErrMalformed},
		"endless value": {[]byte{2, 1, 0x80}, ErrMalformed},
		"tag zero":      {[]byte{2, 0, 1}, ErrMalformed},
		"tag twice":     {[]byte{4, 1, 5, 1, 5}, ErrMalformed},
		"descending":    {[]byte{4, 3, 5, 1, 5}, ErrMalformed},
		"unknown odd":   {[]byte{2, 13, 1}, ErrUnknown},
		"unknown even":  {[]byte{4, 1, 5, 2, 1}, nil},
	} {
		if _, err := Read(keys.KindSetMetadata, c.stored); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

func FuzzRead(f *testing.F) {
	full := Fields{ExpiresAt: 1, Lease: 2, CreateRevision: 3, KeyVersion: 4, ModRevision: 5, Position: 6}
	f.Add(append(full.Append(nil), "value"...))
	f.Fuzz(func(t *testing.T, stored []byte) {
		fields, err := Read(keys.KindSetMetadata, stored)
		if err != nil {
			return
		}
		value := Value(keys.KindSetMetadata, stored)
		again, err := Read(keys.KindSetMetadata, append(fields.Append(nil), value...))
		if err != nil || again != fields {
			t.Fatalf("%+v becomes %+v, %v", fields, again, err)
		}
	})
}
