package keys

import (
	"bytes"
	"testing"
)

func TestTrailerPacksAndOrdersNewestFirst(t *testing.T) {
	for _, e := range []Epoch{0, 1, 255, 256, MaxEpoch} {
		for _, k := range []Kind{KindDelete, KindSet, KindSetMetadata} {
			tr := MakeTrailer(e, k)
			if tr.Epoch() != e || tr.Kind() != k {
				t.Errorf("trailer of (%d, %d) unpacks to (%d, %d)", e, k, tr.Epoch(), tr.Kind())
			}
		}
	}
	if Compare([]byte("a"), MakeTrailer(2, KindSet), []byte("a"), MakeTrailer(1, KindSet)) >= 0 {
		t.Error("the newer version must come first")
	}
	if Compare([]byte("a"), MakeTrailer(1, KindSet), []byte("b"), MakeTrailer(9, KindSet)) >= 0 {
		t.Error("keys come before epochs")
	}
	if Compare([]byte("a"), MakeTrailer(1, KindSet), []byte("a"), MakeTrailer(1, KindSet)) != 0 {
		t.Error("equal is not equal")
	}
}

func TestSpacesKeepKeysApart(t *testing.T) {
	system, user := Append(nil, SpaceSystem, []byte{0xff, 0xff}), Append(nil, SpaceUser, nil)
	if bytes.Compare(system, user) >= 0 {
		t.Error("every system key must lie below every user key")
	}
	if got := User(Append(nil, SpaceUser, []byte("k"))); string(got) != "k" || SpaceOf(user) != SpaceUser {
		t.Errorf("user part %q", got)
	}
}

func TestSuccessorEndsAPrefix(t *testing.T) {
	for _, c := range []struct {
		prefix, want string
		ok           bool
	}{
		{"a", "b", true},
		{"ab", "ac", true},
		{"a\xff", "b", true},
		{"a\xff\xff", "b", true},
		{"\xff", "", false},
		{"", "", false},
		{"a\x00", "a\x01", true},
	} {
		got, ok := Successor(nil, []byte(c.prefix))
		if ok != c.ok || string(got) != c.want {
			t.Errorf("Successor(%q) = %q, %v; want %q, %v", c.prefix, got, ok, c.want, c.ok)
		}
	}
}
