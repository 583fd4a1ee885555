package server

import (
	"bytes"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

func TestTokenReadsBackAndEveryFlippedBitIsFound(t *testing.T) {
	want := token{epoch: 77, reverse: true, last: []byte("some key"), bounds: 0xabcdef01, store: 9}
	text := appendToken(nil, want)
	got, err := decodeToken(text, 9, 100)
	if err != nil || got.epoch != want.epoch || got.reverse != want.reverse || got.bounds != want.bounds || got.store != want.store || !bytes.Equal(got.last, want.last) {
		t.Fatalf("got %+v, %v", got, err)
	}
	for bit := range len(text) * 8 {
		damaged := bytes.Clone(text)
		damaged[bit/8] ^= 1 << (bit % 8)
		if _, err := decodeToken(damaged, 9, 100); err == nil {
			t.Errorf("bit %d flipped and not found", bit)
		}
	}
	for n := range text {
		if _, err := decodeToken(text[:n], 9, 100); err == nil {
			t.Errorf("accepted when cut to %d bytes", n)
		}
	}
}

func TestTokenOfImpossibleContentIsRefused(t *testing.T) {
	for name, bad := range map[string]token{
		"no epoch":   {last: []byte("k")},
		"no key":     {epoch: 1},
		"long key":   {epoch: 1, last: make([]byte, 101)},
		"late epoch": {epoch: keys.MaxEpoch + 1, last: []byte("k")},
	} {
		if _, err := decodeToken(appendToken(nil, bad), 0, 100); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := decodeToken(appendToken(nil, token{epoch: 1, last: make([]byte, 100)}), 0, 100); err != nil {
		t.Errorf("key at the limit: %v", err)
	}
}

func TestRangesHaveDifferentHashes(t *testing.T) {
	seen := map[uint32]bounds{}
	for _, b := range []bounds{
		{}, {upper: []byte{}}, {lower: []byte("a")}, {upper: []byte("a")}, {lower: []byte("a"), upper: []byte("b")}, {lower: []byte("ab")}, {lower: []byte("a"), upper: []byte("")},
	} {
		if other, ok := seen[hashBounds(b)]; ok {
			t.Errorf("%v and %v", b, other)
		}
		seen[hashBounds(b)] = b
	}
}

// FuzzToken: no input crashes the decoder, and what it accepts is what the encoder writes.
func FuzzToken(f *testing.F) {
	f.Add(appendToken(nil, token{epoch: 1, last: []byte("k"), bounds: 2}))
	f.Add(appendToken(nil, token{epoch: keys.MaxEpoch, last: make([]byte, 2048), reverse: true}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := decodeToken(text, 0, 2048)
		if err == nil && !bytes.Equal(appendToken(nil, got), text) {
			t.Fatalf("%x reads as %+v, which writes differently", text, got)
		}
	})
}
