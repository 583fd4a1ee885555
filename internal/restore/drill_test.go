package restore

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// drill makes a drill, and checks that it leaves nothing, neither in its directory nor in the archive.
func (b *bench) drill(progress func(Progress)) (*Report, error) {
	b.t.Helper()
	ctx, cancel := context.WithCancel(b.t.Context())
	defer cancel()
	parent := b.t.TempDir()
	r, err := Drill(ctx, Options{Store: b.target, Dir: parent, PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage(), Progress: func(p Progress) {
		if entries, err := filepath.Glob(filepath.Join(parent, scratchPrefix+"*")); p.Step == "base" && (err != nil || len(entries) != 1) {
			b.t.Errorf("the drill restores to %v: %v", entries, err)
		}
		if progress != nil {
			progress(p)
		}
	}})
	entries, left := os.ReadDir(parent)
	check(b.t, left)
	check(b.t, b.target.Store.List(b.t.Context(), b.lineage().String()+"/restores/", func(o objectstore.Object) error { return errors.New(o.Name + " was left") }))
	if len(entries) > 0 {
		b.t.Fatalf("the drill has left %v", entries)
	}
	return r, err
}

// TestDrillProvesThatTheNewestStateCanBeRestored: with the newest backup and the log after it, while the store is written.
func TestDrillProvesThatTheNewestStateCanBeRestored(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	m, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(20)
	b.archived()
	last := b.arch.Status().Archived
	r, err := b.drill(func(p Progress) {
		if p.Step == "base" {
			b.commits(3)
		}
	})
	check(t, err)
	if r.Base.ID != m.ID || r.Reached.Epoch != last || r.Records != uint64(last-keys.Epoch(m.State.Epoch)) || r.Took == 0 {
		t.Fatalf("%+v", r)
	}
}

// TestDrillFindsWhatARestoreWouldFind: lost and damaged objects of the backup and of the archive make the drill fail, by name.
func TestDrillFindsWhatARestoreWouldFind(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	m, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(20)
	b.archived()
	b.close()
	if _, err := b.drill(nil); err != nil {
		t.Fatal(err)
	}
	logs := b.objects()
	for _, name := range []string{logs[len(logs)-1], b.lineage().String() + "/base/parts/" + m.Parts[0].SHA256} {
		fault := b.target.Inject(objectstore.Fault{Op: objectstore.OpRead, Prefix: name, Kind: objectstore.ReadFlipped, Bytes: 100})
		if _, err := b.drill(nil); err == nil || b.target.Fired(fault) == 0 || !strings.Contains(err.Error(), filepath.Base(name)) {
			t.Errorf("%s is damaged: %v", name, err)
		}
		b.target.Heal()
	}
	if _, err := Drill(t.Context(), Options{Store: b.target, Dir: t.TempDir(), Lineage: b.lineage(), Target: archive.Target{}, PlanOnly: true}); err == nil {
		t.Error("a plan is a drill")
	}
	if _, err := Drill(t.Context(), Options{Store: b.target, Dir: filepath.Join(t.TempDir(), "missing"), Lineage: b.lineage()}); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// TestDrillFindsWhatTheArchiveHasLostSilently: a commit whose key is missing, or has another value, in an archive file that is intact and
// follows the one before makes the drill fail. No checksum tells that, but the contents of the original. A key that has expired since is
// no difference.
func TestDrillFindsWhatTheArchiveHasLostSilently(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	_, err := backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(20)
	b.setLast()
	b.archived()
	want, err := ContentsOf(t.Context(), b.store)
	check(t, err)
	if want.Keys != uint64(len(b.now))+1 {
		t.Fatalf("%d keys, want %d", want.Keys, len(b.now)+1)
	}
	drill := func() error {
		_, err := Drill(t.Context(), Options{Store: b.target, Dir: t.TempDir(), Lineage: b.lineage(), PageSize: 1024, Memory: 64 << 20, Target: archive.Target{Epoch: want.Epoch}, Contents: &want})
		return err
	}
	check(t, drill())
	b.close()
	var name string
	var original []byte
	for _, name = range slices.Backward(b.objects()) {
		if original = b.object(name); hasSet(t, original) {
			break
		}
		check(t, b.target.Delete(t.Context(), name)) // on a busy machine it has the end of the key that expires, and follows the one before
	}
	for what, body := range map[string][]byte{"a lost commit": nil, "a changed value": changedBody(t, original)} {
		b.replace(name, forged(t, original, body))
		differs := new(ContentsError)
		if err := drill(); !errors.As(err, &differs) {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := b.drill(nil); err != nil {
			t.Errorf("%s: the file is not intact: %v", what, err)
		}
	}
	b.replace(name, original)
	check(t, drill())
	other := want
	other.Epoch--
	if _, err := Drill(t.Context(), Options{Store: b.target, Dir: t.TempDir(), Lineage: b.lineage(), Target: archive.Target{Epoch: want.Epoch}, Contents: &other}); !errors.Is(err, errOtherEpoch) {
		t.Error(err)
	}
}

// setLast sets a key, and one that expires soon: it may be there or not.
func (b *bench) setLast() {
	b.t.Helper()
	x, err := b.store.Session()
	check(b.t, err)
	defer x.Close()
	var w mvcc.Write
	w.SetWithMetadata([]byte("soon"), []byte("gone"), &mvcc.Metadata{ExpiresAt: uint64(time.Now().Add(time.Second).UnixMilli())})
	w.Set([]byte("last"), []byte("value that is last"))
	epoch, err := x.Commit(b.t.Context(), &w)
	check(b.t, err)
	check(b.t, b.store.Wait(b.t.Context(), epoch, mvcc.DurabilitySync))
}

// object is the content of an object.
func (b *bench) object(name string) []byte {
	b.t.Helper()
	src, err := b.target.Read(b.t.Context(), name, 0, -1)
	check(b.t, err)
	data, err := io.ReadAll(src)
	check(b.t, errors.Join(err, src.Close()))
	return data
}

func (b *bench) replace(name string, content []byte) {
	b.t.Helper()
	check(b.t, b.target.Delete(b.t.Context(), name))
	check(b.t, b.target.Create(b.t.Context(), name, objectstore.Bytes(content)))
}

// forged is an archive file with the records of another one, but for the last one that sets a user's key, which gets another body.
func forged(t *testing.T, original, body []byte) []byte {
	t.Helper()
	r, records := recordsOf(t, original)
	records[lastSet(t, records)].Body = body
	w := archive.NewWriter()
	w.Reset(r.Header())
	for i := range records {
		check(t, w.Append(&records[i]))
	}
	_, data := w.Finish()
	return bytes.Clone(data)
}

func recordsOf(t *testing.T, data []byte) (r *archive.Reader, records []archive.Record) {
	t.Helper()
	r, err := archive.NewReader("file", bytes.NewReader(data))
	check(t, err)
	for {
		rec, err := r.Next()
		if errors.Is(err, io.EOF) {
			return r, records
		}
		check(t, err)
		rec.Body = bytes.Clone(rec.Body)
		records = append(records, rec)
	}
}

// lastSet is the last record that sets a key.
func lastSet(t *testing.T, records []archive.Record) int {
	t.Helper()
	for i := range slices.Backward(records) {
		if setsValue(records[i]) {
			return i
		}
	}
	t.Fatal("the file has no record with a value")
	return 0
}

func setsValue(r archive.Record) bool { return bytes.Contains(r.Body, []byte("value ")) }

func hasSet(t *testing.T, data []byte) bool {
	t.Helper()
	_, records := recordsOf(t, data)
	return slices.ContainsFunc(records, setsValue)
}

// changedBody is the body of that record with another value of the same length.
func changedBody(t *testing.T, data []byte) []byte {
	t.Helper()
	_, records := recordsOf(t, data)
	return bytes.ReplaceAll(records[lastSet(t, records)].Body, []byte("value "), []byte("VALUE "))
}
