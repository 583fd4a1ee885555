package mvcc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// far is a deadline that no test reaches.
const far = uint64(1) << 50

func putWith(t testing.TB, x *Session, key, value string, f metadata.Fields) {
	t.Helper()
	w := Write{Durability: DurabilityAsync}
	w.SetWithMetadata([]byte(key), []byte(value), &f)
	if _, err := commitAndWait(x, &w); err != nil {
		t.Fatal(err)
	}
}

// seen is what all ways to read say of a key: they must agree.
func seen(t testing.TB, s *Store, key string) (f metadata.Fields, value string, found bool) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	v, err := x.Get(nil, []byte(key), 0)
	if err != nil {
		t.Fatal(err)
	}
	f = mustMetadata(t, x.Metadata)
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	all := x.ReadAll(context.Background(), [][]byte{[]byte("missing"), []byte(key)}, func(i int, v Value) error {
		if g := mustMetadata(t, x.Metadata); i == 0 && g != (metadata.Fields{}) || i == 1 && g != f {
			t.Errorf("ReadAll: key %d of %q has %+v, Get says %+v", i, key, g, f)
		}
		return nil
	})
	if all != nil {
		t.Fatal(all)
	}
	for _, keysOnly := range []bool{false, true} {
		c, err := x.Scan(ScanOptions{Lower: []byte(key), KeysOnly: keysOnly})
		if err != nil {
			t.Fatal(err)
		}
		if c.Next() && string(c.Key()) == key {
			if g := mustMetadata(t, c.Metadata); g != f {
				t.Errorf("a scan of %q has %+v, Get says %+v", key, g, f)
			}
		}
		c.Close()
	}
	if _, err := x.Get(nil, []byte("missing"), 0); err != nil || mustMetadata(t, x.Metadata) != (metadata.Fields{}) {
		t.Errorf("a missing key has the metadata of the key before: %v", err)
	}
	return f, string(v.Data), v.Found
}

func mustMetadata(t testing.TB, read func() (metadata.Fields, error)) metadata.Fields {
	t.Helper()
	f, err := read()
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// queue is the expiry queue as text: deadline and key of each entry.
func queue(t testing.TB, s *Store) map[string]bool {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	entries := make(map[string]bool)
	err := x.ScanSystem(context.Background(), []byte{keys.SystemExpiry}, []byte{keys.SystemExpiry + 1}, func(key, value []byte, _ keys.Epoch) bool {
		internal := keys.Append(nil, keys.SpaceSystem, key)
		owner, ok := keys.Owner(internal)
		if !ok || len(value) != 0 {
			t.Errorf("an entry %q = %q", key, value)
		}
		entries[fmt.Sprint(binary.BigEndian.Uint64(internal[2:]), string(keys.User(owner)))] = true
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

// checkQueue compares the queue with what is rebuilt from the versions. It returns how many entries are stale.
func checkQueue(t testing.TB, s *Store) (stale int) {
	t.Helper()
	entries := queue(t, s)
	stale = len(entries)
	for key := range dump(t, s) {
		if f, _, _ := seen(t, s, key); f.ExpiresAt != 0 {
			if !entries[fmt.Sprint(f.ExpiresAt, key)] {
				t.Errorf("%q has the deadline %d and no entry", key, f.ExpiresAt)
			}
			stale--
		}
	}
	return stale
}

// TestMetadataIsReadBackFromEveryPlace: memtable, leaf and blob; a write without metadata removes it.
func TestMetadataIsReadBackFromEveryPlace(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	s.GuardLeases(withRoom(nil))
	x := mustSession(t, s)
	defer x.Close()
	f := metadata.Fields{ExpiresAt: far, Lease: 7}
	values := map[string]string{"empty": "", "short": "v", "blob": strings.Repeat("long", 4000)}
	check := func(where string) {
		t.Helper()
		for key, value := range values {
			if got, v, found := seen(t, s, key); got != f || v != value || !found {
				t.Errorf("%s: %q is %+v, %d bytes, %v", where, key, got, len(v), found)
			}
		}
		if stale := checkQueue(t, s); stale != 0 {
			t.Errorf("%s: %d stale entries", where, stale)
		}
	}
	for key, value := range values {
		putWith(t, x, key, value, f)
	}
	check("memtable")
	mustCheckpoint(t, s)
	check("tree")
	f.ExpiresAt++
	for key, value := range values {
		putWith(t, x, key, value, f)
	}
	check("both")
	mustPut(t, s, "short", "plain")
	if got, _, _ := seen(t, s, "short"); got != (metadata.Fields{}) {
		t.Errorf("after a put without metadata: %+v", got)
	}
	if stale := checkQueue(t, s); stale != 1 {
		t.Errorf("%d stale entries after a put that looks at nothing", stale)
	}
}

// TestOperationsKeepOrDropTheDeadline: what computes from the old value keeps it, what replaces the value drops it, and a
// deadline of the operation wins; under the latches and in a transaction alike.
func TestOperationsKeepOrDropTheDeadline(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	for i, c := range []struct {
		op      Invoke
		after   uint64
		applied bool
	}{
		{Invoke{Kind: InvokeAdd, Delta: 1}, far, true},
		{Invoke{Kind: InvokeAppend, Operand: []byte("0")}, far, true},
		{Invoke{Kind: InvokeMin}, far, true},
		{Invoke{Kind: InvokeMax}, far, true},
		{Invoke{Kind: InvokeAdd, ExpiresAt: far + 5}, far + 5, true},
		{Invoke{Kind: InvokeCompareSet, Expect: []byte("1"), Operand: []byte("2")}, 0, true},
		{Invoke{Kind: InvokeCompareSet, Expect: []byte("x"), ExpiresAt: far + 5}, far, false},
		{Invoke{Kind: InvokeGetAndSet, Operand: []byte("2")}, 0, true},
		{Invoke{Kind: InvokeGetAndSet, Operand: []byte("2"), ExpiresAt: far + 5}, far + 5, true},
		{Invoke{Kind: InvokePutIfAbsent, ExpiresAt: far + 5}, far, false},
		{Invoke{Kind: InvokeGetAndDelete}, 0, true},
		{Invoke{Kind: InvokeTouch, ExpiresAt: far + 9}, far + 9, true},
		{Invoke{Kind: InvokePersist}, 0, true},
	} {
		for _, transaction := range []bool{false, true} {
			key := fmt.Sprintf("key %d %v", i, transaction)
			putWith(t, x, key, "1", metadata.Fields{ExpiresAt: far})
			c.op.Key = []byte(key)
			out := invokeEither(t, x, c.op, transaction)
			f, value, _ := seen(t, s, key)
			if out.Applied != c.applied || out.ExpiresAt != c.after || f.ExpiresAt != c.after || string(out.New) != value {
				t.Errorf("%+v, transaction %v: %+v, then %+v and %q", c.op, transaction, out, f, value)
			}
		}
	}
	missing := Invoke{Key: []byte("missing"), ExpiresAt: far, Kind: InvokeTouch}
	if out := invokeEither(t, x, missing, false); out.Applied || get(t, s, "missing", 0) != "-" {
		t.Errorf("touch of a missing key: %+v", out)
	}
	mustPut(t, s, "plain", "v")
	if out := invokeEither(t, x, Invoke{Key: []byte("plain"), Kind: InvokePersist}, false); out.Applied {
		t.Errorf("persist of a key without a deadline: %+v", out)
	}
	checkQueue(t, s)
}

func invokeEither(t testing.TB, x *Session, op Invoke, transaction bool) Invoked {
	t.Helper()
	ctx, out := context.Background(), make([]Invoked, 1)
	if !transaction {
		e, err := x.InvokeAll(ctx, []Invoke{op}, nil, DurabilityAsync, out)
		if err != nil || e != 0 && x.store.Wait(ctx, e, DurabilityAsync) != nil {
			t.Fatal(err)
		}
		return out[0]
	}
	tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
	if err != nil {
		t.Fatal(err)
	}
	if out[0], err = tx.Invoke(&op); err != nil {
		t.Fatal(err)
	}
	out[0].New = bytes.Clone(out[0].New)
	if e, err := tx.Commit(ctx); err != nil || x.store.Wait(ctx, e, DurabilityAsync) != nil {
		t.Fatal(err)
	}
	return out[0]
}

// TestTransactionsSeeTheMetadataOfTheirWrites: by get and by scan, also after a savepoint; and a plain write drops it.
func TestTransactionsSeeTheMetadataOfTheirWrites(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	putWith(t, x, "old", "v", metadata.Fields{ExpiresAt: far + 1})
	tx, err := x.Begin(TxnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	key := []byte("k")
	check := func(value string, want uint64) {
		t.Helper()
		v, err := tx.Get(nil, key)
		if err != nil || string(v.Data) != value || mustMetadata(t, tx.Metadata).ExpiresAt != want {
			t.Errorf("get: %q, %+v, %v", v.Data, mustMetadata(t, tx.Metadata), err)
		}
		c, err := tx.Scan(ScanOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if !c.Next() || string(c.Value()) != value || mustMetadata(t, c.Metadata).ExpiresAt != want {
			t.Errorf("scan: %q, %+v", c.Value(), mustMetadata(t, c.Metadata))
		}
		if !c.Next() || mustMetadata(t, c.Metadata).ExpiresAt != far+1 {
			t.Error("the metadata of a committed version is not seen")
		}
	}
	if err := tx.SetWithMetadata(key, []byte("one"), &metadata.Fields{ExpiresAt: far}); err != nil {
		t.Fatal(err)
	}
	check("one", far)
	if _, err := tx.Savepoint(); err != nil {
		t.Fatal(err)
	}
	if err := tx.Set(key, []byte("two")); err != nil {
		t.Fatal(err)
	}
	check("two", 0)
	if err := tx.RollbackTo(1); err != nil {
		t.Fatal(err)
	}
	check("one", far)
	if _, err := tx.Commit(context.Background()); err != nil {
		t.Fatal(err)
	}
	if stale := checkQueue(t, s); stale != 0 {
		t.Errorf("%d stale entries", stale)
	}
}

// TestOlderLevelsHaveNoMetadata: every way to write it is refused before anything is written.
func TestOlderLevelsHaveNoMetadata(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.FeatureLevel = keys.FeatureLevelOldest
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	mustPut(t, s, "k", "1")
	f, ctx := &metadata.Fields{ExpiresAt: far}, context.Background()
	refused := func(how string, err error) {
		t.Helper()
		if level, ok := errors.AsType[*FeatureLevelError](err); !ok || !strings.Contains(level.Error(), "kvctl upgrade finalize") {
			t.Errorf("%s: %v", how, err)
		}
		if got := get(t, s, "k", 0); got != "1" {
			t.Errorf("%s: the value is %q", how, got)
		}
	}
	w := new(Write)
	w.SetWithMetadata([]byte("k"), []byte("2"), f)
	_, err := x.Commit(ctx, w)
	refused("put", err)
	_, err = x.InvokeAll(ctx, []Invoke{{Kind: InvokeAdd, Delta: 1, Key: []byte("k"), ExpiresAt: far}}, nil, DurabilityDefault, make([]Invoked, 1))
	refused("invoke", err)
	tx, err := x.Begin(TxnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	refused("transaction", tx.SetWithMetadata([]byte("k"), []byte("2"), f))
	tx.Rollback()
	if _, err := s.FinalizeUpgrade(ctx); err != nil {
		t.Fatal(err)
	}
	putWith(t, x, "k", "2", *f)
	checkQueue(t, s)
}

// TestLimitsCountTheValueAndNotItsMetadata, and the key of a queue entry fits into the tree.
func TestLimitsCountTheValueAndNotItsMetadata(t *testing.T) {
	o := tiny(vfs.NewMem())
	longest := storage.KeyBytesMax(defaultPageSize) - keys.OwnedBytes
	o.Limits.ValueBytes, o.Limits.BatchBytes = 1000, 1000+longest
	s := mustOpen(t, o)
	s.GuardLeases(withRoom(nil))
	x := mustSession(t, s)
	defer x.Close()
	for _, c := range []struct {
		key, value int
		ok         bool
	}{{longest, 1000, true}, {longest + 1, 1, false}, {1, 1001, false}} {
		f, key, value := &metadata.Fields{ExpiresAt: far, Lease: far}, bytes.Repeat([]byte("k"), c.key), make([]byte, c.value)
		w := Write{Durability: DurabilityAsync}
		w.SetWithMetadata(key, value, f)
		_, err := commitAndWait(x, &w)
		tx, begun := x.Begin(TxnOptions{})
		if begun != nil {
			t.Fatal(begun)
		}
		inTxn := tx.SetWithMetadata(key, value[:min(c.value, 1001)], f)
		tx.Rollback()
		limit := new(*LimitError)
		if c.ok && err != nil || !c.ok && (!errors.As(err, limit) || !errors.As(inTxn, limit)) {
			t.Errorf("key of %d bytes, value of %d: %v, %v", c.key, c.value, err, inTxn)
		}
	}
	mustCheckpoint(t, s)
	if stale := checkQueue(t, s); stale != 0 {
		t.Errorf("%d stale entries", stale)
	}
}

// TestQueueEqualsWhatVersionsSay: after random writes of all kinds by several sessions, each key with a deadline has its
// entry, and only plain puts and deletions have left stale ones; also after a crash.
func TestQueueEqualsWhatVersionsSay(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	var writers sync.WaitGroup
	for n := range 3 {
		writers.Go(func() {
			x := mustSession(t, s)
			defer x.Close()
			rng := rand.New(rand.NewPCG(7, uint64(n)))
			for range 300 {
				if err := writeRandomly(x, rng); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	checkQueue(t, s)
	mustCheckpoint(t, s)
	checkQueue(t, s)
	s = mustOpen(t, tiny(fs.Crash(1, vfs.SurviveNone)))
	checkQueue(t, s)
	x := mustSession(t, s)
	defer x.Close()
	for range 100 { // refreshing leaves no stale entries
		putWith(t, x, "refreshed", "v", metadata.Fields{ExpiresAt: far + rand.Uint64N(1000)})
	}
	refreshed := 0
	for entry := range queue(t, s) {
		if strings.HasSuffix(entry, "refreshed") {
			refreshed++
		}
	}
	if refreshed != 1 {
		t.Errorf("%d entries of a key that was refreshed", refreshed)
	}
}

func writeRandomly(x *Session, rng *rand.Rand) error {
	ctx := context.Background()
	key := func() []byte { return fmt.Appendf(nil, "key %d", rng.IntN(30)) }
	f := metadata.Fields{ExpiresAt: far + rng.Uint64N(4)}
	w := Write{Durability: DurabilityAsync}
	switch rng.IntN(6) {
	case 0:
		w.Set(key(), []byte("1"))
	case 1:
		w.Delete(key())
	case 2, 3:
		w.SetWithMetadata(key(), []byte("1"), &f)
		w.SetWithMetadata([]byte("other"), nil, &f)
	case 4:
		op := Invoke{Kind: []InvokeKind{InvokeAdd, InvokeTouch, InvokePersist, InvokeGetAndDelete}[rng.IntN(4)], Key: key(), ExpiresAt: f.ExpiresAt}
		if op.Kind == InvokePersist {
			op.ExpiresAt = 0
		}
		_, err := x.InvokeAll(ctx, []Invoke{op}, nil, DurabilityAsync, make([]Invoked, 1))
		return err
	case 5:
		t, err := x.Begin(TxnOptions{Isolation: IsolationSnapshot, Durability: DurabilityAsync})
		if err != nil {
			return err
		}
		if err := t.SetWithMetadata(key(), []byte("2"), &f); err != nil {
			return err
		}
		if _, err = t.Commit(ctx); errors.As(err, new(*ConflictError)) {
			return nil
		}
		return err
	}
	_, err := commitAndWait(x, &w)
	return err
}

// TestCommitComputesUnderItsLatches: a function sees the newest versions, and what it adds is in the same commit; its
// error changes nothing.
func TestCommitComputesUnderItsLatches(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	epoch := mustPut(t, s, "guard", "closed")
	guard := keys.Append(nil, keys.SpaceUser, []byte("guard"))
	failed := errors.New("the guard is closed")
	w := &Write{}
	fill := func() {
		w.Reset()
		w.Set([]byte("k"), []byte("v"))
		w.Latch(guard)
		w.Under(func(l *Latched) error {
			n, err := l.Newest(guard)
			if err != nil || n.Epoch == epoch || len(n.Value) > 0 { // values of clients, which may be large, are not copied
				return errors.Join(failed, err)
			}
			l.Write().Batch.SetRecord(keys.SpaceSystem, keys.AppendOwned(nil, keys.SystemAttachment, 1, keys.Append(nil, keys.SpaceUser, []byte("k"))), []byte("open"))
			return nil
		})
	}
	fill()
	if _, err := x.Commit(context.Background(), w); !errors.Is(err, failed) || get(t, s, "k", 0) != "-" {
		t.Fatalf("closed: %v", err)
	}
	mustPut(t, s, "guard", "open")
	fill()
	if _, err := commitAndWait(x, w); err != nil {
		t.Fatal(err)
	}
	seenRecord := ""
	err := x.ScanSystem(context.Background(), []byte{keys.SystemAttachment}, nil, func(_, value []byte, e keys.Epoch) bool {
		seenRecord = string(value)
		return false
	})
	if err != nil || seenRecord != "open" || get(t, s, "k", 0) != "v" {
		t.Fatalf("open: record %q, %v", seenRecord, err)
	}
}

// TestPutWithDeadlineAllocatesNothing, like every put.
func TestPutWithDeadlineAllocatesNothing(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.MemtableBytes, o.Storage.SegmentBytes = 8<<20, 8<<20
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	w, key, value := &Write{}, []byte("key"), make([]byte, 100)
	at := far
	commit := func() {
		w.Reset()
		w.Durability = DurabilityAsync
		at++
		w.SetWithMetadata(key, value, &metadata.Fields{ExpiresAt: at})
		if _, err := x.Commit(context.Background(), w); err != nil {
			t.Fatal(err)
		}
	}
	commit()
	if n := testing.AllocsPerRun(200, commit); n >= 1 && exhaustiveStep == 1 { // the race detector allocates
		t.Errorf("%v allocations", n)
	}
}
