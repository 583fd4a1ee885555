package server

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"testing"

	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
)

var feedTokenSamples = []feedToken{
	{},
	{lineage: keys.Lineage{1, 2, 3}, position: feed.Position{Epoch: keys.MaxEpoch, Operations: 1<<32 - 1}, filter: 1<<64 - 1},
	{lineage: keys.Lineage{15: 9}, position: feed.Position{Epoch: 7}, filter: 3, snapshot: 7, last: []byte("key")},
	{lineage: keys.Lineage{15: 9}, position: feed.Position{Epoch: 6}, filter: 3, snapshot: 7, last: []byte("key"), load: true},
	{lineage: keys.Lineage{15: 9}, filter: 3, snapshot: 7, last: []byte("key"), first: true},
}

// TestFeedTokenIsWhatTheDocumentSays: docs/formats.md describes these bytes, and clients keep them for as long as they like.
func TestFeedTokenIsWhatTheDocumentSays(t *testing.T) {
	for i, want := range []string{
		"01" + "00000000000000000000000000000000" + "00000000000000" + "00000000" + "0000000000000000" + "6e9deac9",
		"01" + "01020300000000000000000000000000" + "ffffffffffffff" + "ffffffff" + "ffffffffffffffff" + "3c5a6793",
		"02" + "00000000000000000000000000000009" + "07000000000000" + "00000000" + "0300000000000000" + "07000000000000" + "6b6579" + "0dc67cd3",
		"03" + "00000000000000000000000000000009" + "06000000000000" + "00000000" + "0300000000000000" + "07000000000000" + "6b6579" + "c66cb764",
		"04" + "00000000000000000000000000000009" + "00000000000000" + "00000000" + "0300000000000000" + "07000000000000" + "6b6579" + "81682a9a",
	} {
		if got := hex.EncodeToString(feedTokenSamples[i].encode()); got != want {
			t.Errorf("sample %d is\n%s, want\n%s", i, got, want)
		}
	}
}

// TestEveryChangedByteOfAFeedTokenIsFound, and every wrong length.
func TestEveryChangedByteOfAFeedTokenIsFound(t *testing.T) {
	for _, sample := range feedTokenSamples {
		b := sample.encode()
		for i := range b {
			changed := bytes.Clone(b)
			changed[i] ^= 0x10
			if got, err := decodeFeedToken(changed, 100); err == nil {
				t.Errorf("byte %d changed: %+v", i, got)
			}
			if got, err := decodeFeedToken(b[:i], 100); err == nil {
				t.Errorf("%d bytes: %+v", i, got)
			}
		}
	}
}

func FuzzFeedToken(f *testing.F) {
	for _, sample := range feedTokenSamples {
		f.Add(sample.encode())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := decodeFeedToken(b, 100)
		if err != nil {
			if !errors.As(err, new(*argumentError)) {
				t.Fatal(err)
			}
			return
		}
		if again := got.encode(); !bytes.Equal(again, b) {
			t.Fatalf("%x decodes as %+v, which is %x", b, got, again)
		}
	})
}

// TestTokensDistinguishRangesAndKinds.
func TestTokensDistinguishRangesAndKinds(t *testing.T) {
	seen := map[uint64]any{}
	for _, c := range []struct {
		ranges []feed.Range
		kinds  feed.Kinds
	}{
		{[]feed.Range{{}}, 0},
		{[]feed.Range{{}}, feed.KindSets},
		{[]feed.Range{{Upper: []byte{}}}, 0},
		{[]feed.Range{{Lower: []byte("a")}}, 0},
		{[]feed.Range{{Lower: []byte("a"), Upper: []byte("b")}}, 0},
		{[]feed.Range{{Lower: []byte("a"), Upper: []byte("b")}, {Lower: []byte("c")}}, 0},
		{[]feed.Range{{Lower: []byte("a"), Upper: []byte("bc")}}, 0},
	} {
		h := watchFilter(c.ranges, c.kinds)
		if other, twice := seen[h]; twice && !reflect.DeepEqual(other, c) {
			t.Errorf("%v has the hash of %v", c, other)
		}
		seen[h] = c
	}
}
