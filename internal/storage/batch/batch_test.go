package batch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
)

func finish(t testing.TB, b *Builder) []byte {
	t.Helper()
	body, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	return body.Bytes()
}

// list reads a body as text.
func list(t testing.TB, body []byte) string {
	t.Helper()
	var r Reader
	if err := r.Read(body); err != nil {
		t.Fatal(err)
	}
	var out []string
	for r.Next() {
		out = append(out, fmt.Sprintf("%s%d=%s", keys.User(r.Key), r.Kind, r.Value))
	}
	if r.Err() != nil || r.count != len(out) {
		t.Fatalf("%d of %d operations, %v", len(out), r.count, r.Err())
	}
	return strings.Join(out, " ")
}

func TestBodyIsSortedWhateverTheOrderOfCalls(t *testing.T) {
	var b Builder
	for range 3 { // a reused builder gives the same
		b.Reset()
		b.Set(keys.SpaceUser, []byte("c"), []byte("3"))
		b.Delete(keys.SpaceUser, []byte("a"))
		b.Set(keys.SpaceUser, []byte("b"), nil)
		if got := list(t, finish(t, &b)); got != "a0= b1= c1=3" {
			t.Fatal(got)
		}
		if b.Size() != len(finish(t, &b)) || b.Count() != 3 || b.ValueBytesMax() != 1 {
			t.Fatalf("size %d, count %d, longest value %d", b.Size(), b.Count(), b.ValueBytesMax())
		}
	}
}

func TestKeyNamedTwiceIsRefused(t *testing.T) {
	var b Builder
	b.Set(keys.SpaceUser, []byte("b"), nil)
	b.Set(keys.SpaceUser, []byte("a"), nil)
	b.Delete(keys.SpaceUser, []byte("b"))
	_, err := b.Finish()
	twice := new(DuplicateKeyError)
	if !errors.As(err, &twice) || string(twice.Key) != "b" || !errors.Is(err, ErrDuplicateKey) {
		t.Fatalf("error %v", err)
	}
	b.Reset()
	b.Set(keys.SpaceUser, []byte("k"), nil)
	b.Set(keys.SpaceUser, []byte("k"), nil)
	if _, err := b.Finish(); !errors.Is(err, ErrDuplicateKey) {
		t.Fatalf("neighbours: %v", err)
	}
}

func TestEmptyBodyIsANoOp(t *testing.T) {
	var b Builder
	if got := list(t, finish(t, &b)); got != "" {
		t.Fatal(got)
	}
}

func TestReaderRefusesWhatItDoesNotKnow(t *testing.T) {
	var b Builder
	b.Set(keys.SpaceUser, []byte("k"), []byte("v"))
	good := bytes.Clone(finish(t, &b))
	for name, spoil := range map[string]func(p []byte) []byte{
		"short header":   func(p []byte) []byte { return p[:HeaderSize-1] },
		"flags":          func(p []byte) []byte { p[4] = 4; return p },
		"no time":        func(p []byte) []byte { p[4] = 1; return p[:HeaderSize+7] },
		"no origin":      func(p []byte) []byte { p[4] = 2; return p[:HeaderSize] },
		"client origin":  func(p []byte) []byte { p[4] = 2; p[HeaderSize] = 0; return p },
		"origin":         func(p []byte) []byte { p[4] = 2; p[HeaderSize] = originCount; return p },
		"reserved":       func(p []byte) []byte { p[7] = 1; return p },
		"count too high": func(p []byte) []byte { binary.LittleEndian.PutUint32(p, 2); return p },
		"count too low":  func(p []byte) []byte { binary.LittleEndian.PutUint32(p, 0); return p },
		"no metadata":    func(p []byte) []byte { p[HeaderSize] |= byte(keys.KindMetadata); return p },
		"kind":           func(p []byte) []byte { p[HeaderSize] = 7; return p },
		"key length":     func(p []byte) []byte { p[HeaderSize+1] = 200; return p },
		"no key":         func(p []byte) []byte { p[HeaderSize+1] = 0; return p },
		"value length":   func(p []byte) []byte { p[HeaderSize+4] = 200; return p },
		"cut":            func(p []byte) []byte { return p[:len(p)-1] },
		"trailing byte":  func(p []byte) []byte { return append(p, 0) },
	} {
		if err := Validate(spoil(bytes.Clone(good))); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := Validate(good); err != nil {
		t.Errorf("unspoiled: %v", err)
	}
}

// TestBodyTellsOfItsCommit: time and origin are read back, from a contiguous body and from one in pieces, and the operations
// with them.
func TestBodyTellsOfItsCommit(t *testing.T) {
	long := bytes.Repeat([]byte("v"), sharedBytesMin)
	for _, h := range []Header{{}, {Time: 1}, {Origin: OriginExpiry}, {Time: 1 << 60, Origin: OriginRestore}} {
		var b Builder
		b.SetShared(keys.SpaceUser, []byte("b"), long)
		b.Delete(keys.SpaceUser, []byte("a"))
		b.SetHeader(h) // once the operations are known
		body, err := b.Finish()
		if err != nil {
			t.Fatal(err)
		}
		if body.Size() != len(body.Bytes()) || b.Size() != body.Size() {
			t.Fatalf("%d bytes, size %d, builder's %d", len(body.Bytes()), body.Size(), b.Size())
		}
		var pieces, whole Reader
		if err := errors.Join(pieces.ReadBody(body), whole.Read(body.Bytes()), Validate(body.Bytes())); err != nil {
			t.Fatal(err)
		}
		if pieces.Header() != h || whole.Header() != h {
			t.Fatalf("%+v and %+v, want %+v", pieces.Header(), whole.Header(), h)
		}
		if got := list(t, body.Bytes()); got != "a0= b1="+string(long) {
			t.Fatal(got)
		}
		if timed := body.SetTime(h.Time + 1); timed != (h.Time != 0) {
			t.Fatalf("time set: %v", timed)
		} else if timed {
			h.Time++
		}
		if err := errors.Join(pieces.ReadBody(body), whole.Read(body.Bytes()), Validate(body.Bytes())); err != nil || pieces.Header() != h || whole.Header() != h {
			t.Fatalf("%+v and %+v, want %+v, %v", pieces.Header(), whole.Header(), h, err)
		}
		b.Reset()
		b.Delete(keys.SpaceUser, []byte("a"))
		if again, err := b.Finish(); err != nil || whole.Read(again.Bytes()) != nil || whole.Header() != (Header{}) {
			t.Fatalf("a reset builder keeps %+v, %v", whole.Header(), err)
		}
	}
}

func TestMetadataGoesThroughABatch(t *testing.T) {
	f := metadata.Fields{ExpiresAt: 1234567890123, Lease: 7}
	var b Builder
	b.SetStored(keys.KindSetMetadata, keys.SpaceUser, []byte("k"), append(f.Append(nil), "value"...))
	body := finish(t, &b)
	var r Reader
	if err := r.Read(body); err != nil || !r.Next() || Validate(body) != nil {
		t.Fatal(err, r.Err(), Validate(body))
	}
	if got, err := metadata.Read(r.Kind, r.Value); err != nil || got != f || string(metadata.Value(r.Kind, r.Value)) != "value" {
		t.Fatalf("%+v, %v", got, err)
	}
	unknown := bytes.Replace(body, f.Append(nil)[:2], []byte{f.Append(nil)[0], 13}, 1)
	if err := Validate(unknown); !errors.Is(err, metadata.ErrUnknown) {
		t.Fatalf("a tag that must be understood and is not: %v", err)
	}
}

func TestUnsortedBodyIsInvalid(t *testing.T) {
	var b Builder
	b.Set(keys.SpaceUser, []byte("b"), nil)
	b.Set(keys.SpaceUser, []byte("a"), nil)
	finish(t, &b)
	start := HeaderSizeMax - HeaderSize // of the operations in the order in which they came
	binary.LittleEndian.PutUint32(b.buf[start:], 2)
	if err := Validate(b.buf[start:]); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("error %v", err)
	}
}

func TestBuilderAllocatesNothingOnceWarm(t *testing.T) {
	var b Builder
	rng := rand.New(rand.NewPCG(1, 2))
	key, value := make([]byte, 16), make([]byte, 100)
	fill := func() {
		b.Reset()
		for range 10 {
			binary.BigEndian.PutUint64(key, rng.Uint64())
			b.Set(keys.SpaceUser, key, value)
		}
		if _, err := b.Finish(); err != nil {
			t.Fatal(err)
		}
	}
	fill()
	fill()
	if n := testing.AllocsPerRun(100, fill); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

// FuzzRead decodes arbitrary bytes: no panic, and what is valid survives being built again.
func FuzzRead(f *testing.F) {
	var b Builder
	b.Set(keys.SpaceUser, []byte("key"), []byte("value"))
	b.Delete(keys.SpaceUser, []byte("gone"))
	body, _ := b.Finish()
	f.Add(bytes.Clone(body.Bytes()))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, body []byte) {
		if Validate(body) != nil {
			return
		}
		var r Reader
		_ = r.Read(body) // it is valid
		var again Builder
		again.SetHeader(r.Header())
		for r.Next() {
			if r.Kind == keys.KindDelete {
				again.Delete(keys.SpaceOf(r.Key), keys.User(r.Key))
			} else {
				again.SetStored(r.Kind, keys.SpaceOf(r.Key), keys.User(r.Key), r.Value)
			}
		}
		if list(t, body) != list(t, finish(t, &again)) {
			t.Fatalf("%x does not survive", body)
		}
	})
}

func BenchmarkBuildOne(b *testing.B) {
	var w Builder
	key, value := make([]byte, 16), make([]byte, 100)
	b.ReportAllocs()
	for b.Loop() {
		w.Reset()
		w.Set(keys.SpaceUser, key, value)
		if _, err := w.Finish(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkBuildMany builds batches of 1000 random keys; ns/key is the figure.
func BenchmarkBuildMany(b *testing.B) {
	const size = 1000
	rng := rand.New(rand.NewPCG(1, 2))
	list := make([][]byte, size)
	for i := range list {
		list[i] = binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, rng.Uint64()), rng.Uint64())
	}
	value := make([]byte, 100)
	var builder Builder
	b.ReportAllocs()
	for b.Loop() {
		builder.Reset()
		for _, key := range list {
			builder.Set(keys.SpaceUser, key, value)
		}
		if _, err := builder.Finish(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/size, "ns/key")
}

// TestBuilderKeepsNoHugeBuffers: after a batch of very many operations, a pooled builder gives its
// large buffers back.
func TestBuilderKeepsNoHugeBuffers(t *testing.T) {
	var b Builder
	for i := range 300_000 {
		b.Delete(keys.SpaceUser, []byte{byte(i), byte(i >> 8), byte(i >> 16)})
	}
	if _, err := b.Finish(); err != nil {
		t.Fatal(err)
	}
	before := b.MemoryBytes()
	if b.Reset(); b.MemoryBytes() > before/2 {
		t.Errorf("%d bytes are held behind a batch that took %d", b.MemoryBytes(), before)
	}
}
