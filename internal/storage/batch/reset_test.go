package batch

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"weak"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
)

// TestResetKeepsNothingOfAHugeBatch, sorted or not: builders are pooled with their sessions.
func TestResetKeepsNothingOfAHugeBatch(t *testing.T) {
	for _, order := range []int{1, -1} {
		var b Builder
		for i := range 300_000 {
			b.Set(keys.SpaceUser, fmt.Appendf(nil, "%010d", 1_000_000+order*i), []byte("a value of some bytes"))
		}
		if _, err := b.Finish(); err != nil {
			t.Fatal(err)
		}
		buf, spans := weak.Make(&b.buf[0]), weak.Make(&b.spans[0])
		b.Reset()
		runtime.GC()
		if buf.Value() != nil || spans.Value() != nil {
			t.Errorf("order %d: the operations or their places are still in memory", order)
		}
		runtime.KeepAlive(&b)
	}
}

// TestReserveKeepsWhatWasAdded: the record of a request is in the batch before its operations.
func TestReserveKeepsWhatWasAdded(t *testing.T) {
	var b Builder
	b.SetRecord(keys.SpaceSystem, []byte("request"), []byte("record"))
	b.Reserve(Room{Operations: 1000, Bytes: 20_000})
	b.Delete(keys.SpaceUser, []byte("key"))
	body, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	var r Reader
	if err := r.ReadBody(body); err != nil {
		t.Fatal(err)
	}
	var got []string
	for r.Next() {
		got = append(got, string(keys.User(r.Key)))
	}
	if !slices.Equal(got, []string{"request", "key"}) || r.Err() != nil {
		t.Errorf("the batch has %q, %v", got, r.Err())
	}
}

// TestAReservedBatchDoesNotGrow: of a batch whose keys are in no order, only their order is allocated beside what was reserved (twice with the race detector).
func TestAReservedBatchDoesNotGrow(t *testing.T) {
	const n, keyBytes = 100_000, 10
	var before, after runtime.MemStats
	var all [][]byte
	for i := range n {
		all = append(all, fmt.Appendf(nil, "%010d", i*7919%n))
	}
	runtime.ReadMemStats(&before)
	var b Builder
	b.Reserve(Room{Operations: n, Bytes: n * (OperationBytesMax + 1 + keyBytes)})
	for _, key := range all {
		b.Delete(keys.SpaceUser, key)
	}
	_, err := b.Finish()
	runtime.ReadMemStats(&after)
	if err != nil {
		t.Fatal(err)
	}
	for i := 1; i < n; i++ {
		if bytes.Compare(b.Key(i-1), b.Key(i)) >= 0 {
			t.Fatalf("the key of operation %d is %q after %q", i, b.Key(i), b.Key(i-1))
		}
	}
	if got, most := int(after.TotalAlloc-before.TotalAlloc), b.MemoryBytes()+n*20; got > most {
		t.Errorf("%d bytes allocated for a batch of %d, at most %d are expected", got, b.MemoryBytes(), most)
	}
}

// TestAHugeBatchCopiesFewValues: many short values are in memory once, and what is reserved is enough for them. The body is that of a batch of copies.
func TestAHugeBatchCopiesFewValues(t *testing.T) {
	const n, valueBytes = 50_000, 100
	var shared, copied Builder
	room, f := Room{Operations: n}, metadata.Fields{ExpiresAt: 1 << 40}
	values := make([][]byte, n)
	for i := range values {
		values[i] = bytes.Repeat([]byte{byte(i)}, valueBytes-i%2*valueBytes/2)
		room.Bytes += OperationBytesMax + 11 + i%3/2*metadata.DeadlineBytesMax
		room.AddValue(len(values[i]))
	}
	shared.Reserve(room)
	had := shared.MemoryBytes()
	for i, value := range values {
		key := fmt.Appendf(nil, "%010d", i*7919%n)
		if i%3 == 2 {
			shared.SetMetadataShared(keys.SpaceUser, key, &f, value)
			copied.SetStored(keys.KindSetMetadata, keys.SpaceUser, key, append(f.Append(nil), value...))
			continue
		}
		shared.SetShared(keys.SpaceUser, key, value)
		copied.Set(keys.SpaceUser, key, value)
	}
	if got, most := len(shared.buf), n*(2+11+2+metadata.DeadlineBytesMax/3+valueBytes/4)+hugeBytes; got > most {
		t.Errorf("%d bytes are copied, at most %d are expected", got, most)
	}
	if got := shared.MemoryBytes(); got != had {
		t.Errorf("it has grown from %d to %d bytes", had, got)
	}
	pieces, whole := finishBoth(t, &shared, &copied)
	if !bytes.Equal(pieces.Bytes(), whole.Bytes()) {
		t.Error("the bytes differ")
	}
	checkSameOperations(t, pieces, whole)
}
