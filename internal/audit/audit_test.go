package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

func options(t *testing.T) Options {
	return Options{
		Path: filepath.Join(t.TempDir(), "audit.log"), FileBytes: 1 << 20, Files: 3, QueueBytes: 64 << 10,
		Full: FullDrop, Keys: KeysHash, Chain: true, Log: slog.New(slog.DiscardHandler), retry: 10 * time.Millisecond,
	}
}

func mustOpen(t *testing.T, o Options) *Log {
	t.Helper()
	l, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func event(i int) *Event {
	return &Event{Time: time.Unix(int64(i), 0), Class: ClassWrite, User: "ann", Peer: "[::1]:1", Method: "Put", Code: "OK", Epoch: uint64(i), Took: time.Millisecond}
}

// write writes n lines and closes the log.
func write(t *testing.T, o Options, n int) {
	t.Helper()
	l := mustOpen(t, o)
	for i := range n {
		l.Write(event(i+1), 0)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func files(t *testing.T, o Options) []string {
	t.Helper()
	all, err := filepath.Glob(o.Path + "*")
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestChainContinuesOverRotationsAndRestarts: lines are numbered without gaps, and at most so many files are kept.
func TestChainContinuesOverRotationsAndRestarts(t *testing.T) {
	o := options(t)
	o.FileBytes = 4096
	for range 4 {
		write(t, o, 10)
	}
	all := files(t, o)
	r, err := Verify(all)
	if err != nil || len(all) < 2 || len(all) > o.Files || r.Last != 4*12 || r.Unclean != 0 || r.Chained != r.Lines || r.Lines != int(r.Last-r.First+1) {
		t.Errorf("%v: %+v, %v", all, r, err)
	}
	o.FileBytes = 300 // every line or two
	write(t, o, 50)
	if all = files(t, o); len(all) != o.Files {
		t.Errorf("%d files: %v", len(all), all)
	}
	if r, err = Verify(all); err != nil || r.Last != 4*12+52 || r.First == 1 {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestVerifyNamesTheFirstLineThatIsWrong: changed, removed, inserted, moved, without its hash; in the middle and over files.
func TestVerifyNamesTheFirstLineThatIsWrong(t *testing.T) {
	o := options(t)
	write(t, o, 9) // with opened and closed, lines 1 to 11
	text, err := os.ReadFile(o.Path)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	lines = lines[:len(lines)-1]
	join := func(parts ...[][]byte) []byte {
		var all []byte
		for _, p := range parts {
			all = append(all, bytes.Join(p, nil)...)
		}
		return all
	}
	change := func(i int, old, to string) []byte {
		return join(lines[:i], [][]byte{bytes.Replace(lines[i], []byte(old), []byte(to), 1)}, lines[i+1:])
	}
	for name, c := range map[string]struct {
		text []byte
		line int
		what string
	}{
		"changed":            {change(4, "ann", "bob"), 5, "changed"},
		"hash changed":       {change(4, `"previous":"`, `"previous":"0`), 5, "changed"},
		"hash removed":       {change(4, `"previous"`, `"privious"`), 5, "no hash"},
		"removed":            {join(lines[:4], lines[5:]), 5, "lines 5 to 5 before it were removed"},
		"two removed":        {join(lines[:4], lines[6:]), 5, "lines 5 to 6"},
		"inserted":           {join(lines[:4], lines[3:4], lines[4:]), 4, "inserted"},
		"inserted with care": {join(lines[:4], [][]byte{bytes.Replace(lines[4], []byte("ann"), []byte("bob"), 1)}, lines[4:]), 5, "inserted"},
		"not a line":         {join(lines[:4], [][]byte{[]byte("x\n")}, lines[4:]), 5, "not a line"},
		"end removed":        {bytes.TrimSuffix(text, []byte("\n")), 11, "no end"},
	} {
		path := filepath.Join(t.TempDir(), "copy")
		if err := os.WriteFile(path, c.text, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Verify([]string{path})
		var f *LineError
		if !errors.As(err, &f) || f.Line != c.line || !strings.Contains(f.What, c.what) {
			t.Errorf("%s: %v, want line %d: %s", name, err, c.line, c.what)
		}
	}
	if r, err := Verify([]string{o.Path}); err != nil || r.Lines != 11 {
		t.Errorf("the log itself: %+v, %v", r, err)
	}
}

// TestUncleanEndIsALine: a log that was not closed, and a line of which a part was written: its beginning, or, by pages that came to the disk out of
// their order, its end.
func TestUncleanEndIsALine(t *testing.T) {
	for _, last := range []func(text []byte) []byte{
		func(text []byte) []byte { return text[:len(text)-20] }, // within the last line, "closed"
		func(text []byte) []byte { clear(text[len(text)-60 : len(text)-20]); return text },
	} {
		o := options(t)
		write(t, o, 3)
		text, err := os.ReadFile(o.Path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(o.Path, last(text), 0o600); err != nil {
			t.Fatal(err)
		}
		write(t, o, 1)
		text, _ = os.ReadFile(o.Path)
		if r, err := Verify([]string{o.Path}); err != nil || r.Unclean != 1 || r.Lines != 7 || !bytes.Contains(text, []byte(`"opened_after_unclean_end","removed_bytes":`)) {
			t.Errorf("%+v, %v: %s", r, err, text)
		}
	}
}

// faulty fails while its disk is full.
type faulty struct {
	file
	full *atomic.Bool
}

func (f *faulty) Write(b []byte) (int, error) {
	if f.full.Load() {
		n, _ := f.file.Write(b[:len(b)/2])
		return n, syscall.ENOSPC
	}
	return f.file.Write(b)
}

func withFullDisk(o *Options) *atomic.Bool {
	full := new(atomic.Bool)
	o.openFile = func(path string) (file, error) {
		f, err := openFile(path)
		return &faulty{f, full}, err
	}
	return full
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(what)
		}
	}
}

// TestDroppedLinesAreCountedInTheLog: while the disk is full, requests go on; what found no room is a line afterwards.
func TestDroppedLinesAreCountedInTheLog(t *testing.T) {
	o := options(t)
	o.QueueBytes = 2000
	full := withFullDisk(&o)
	l := mustOpen(t, o)
	full.Store(true)
	for i := range 100 { // with what the server admits, and without
		admitted := 500 * (i % 2)
		if err := l.Admit(t.Context(), nil, admitted); err != nil {
			t.Fatal(err)
		}
		l.Write(event(i+1), admitted)
	}
	eventually(t, "no error", func() bool { return l.Err() != nil })
	dropped := l.Stats().Dropped
	if s := l.Stats(); dropped < 80 || s.QueueBytes > o.QueueBytes+100 || s.Errors == 0 {
		t.Errorf("%+v", s)
	}
	full.Store(false)
	eventually(t, "nothing was written", func() bool { return l.Err() == nil && l.Stats().QueueBytes == 0 })
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	text, _ := os.ReadFile(o.Path)
	told := uint64(0)
	for line := range strings.Lines(string(text)) {
		n := uint64(0)
		if _, after, ok := strings.Cut(line, `"dropped","lines":`); ok {
			_, _ = fmt.Sscan(strings.TrimSuffix(after, "}\n"), &n)
		}
		told += n
	}
	if r, err := Verify([]string{o.Path}); err != nil || !r.Dropped || told != dropped {
		t.Errorf("%+v, %v: %d lines were dropped, and the log tells of %d\n%s", r, err, dropped, told, text)
	}
}

// TestUnknownClientsPushNoLineOut: of lines about clients that are not known, which cost these nothing, a bounded number is written each second. What the
// others had room for is free again.
func TestUnknownClientsPushNoLineOut(t *testing.T) {
	o := options(t)
	o.QueueBytes, o.Full = 400, FullBlock
	l := mustOpen(t, o)
	for i := range 2 * 4 * unknownMax {
		e := event(1 + i/(4*unknownMax)) // two seconds
		if e.User, e.UnknownClient = "", true; i%2 == 0 {
			if err := l.Admit(t.Context(), nil, 300); err != nil {
				t.Fatal(err)
			}
			l.Write(e, 300)
		} else {
			l.Write(e, 0)
		}
	}
	if err := l.Admit(t.Context(), nil, 300); err != nil {
		t.Fatal(err)
	}
	admitted := make(chan error, 1)
	go func() { admitted <- l.Admit(t.Context(), nil, 300) }() // waits for the room of the one before
	time.Sleep(time.Millisecond)
	l.Write(&Event{Time: time.Unix(2, 0), UnknownClient: true}, 300)
	select {
	case err := <-admitted:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(patience / 2):
		t.Fatal("the room of a line that is not written is not free")
	}
	l.Write(event(2), 300)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(o.Path)
	if err != nil {
		t.Fatal(err)
	}
	unknown, others := strings.Count(string(text), `"user":""`), strings.Count(string(text), `"user":"ann"`)
	if r, err := Verify([]string{o.Path}); err != nil || !r.Dropped || unknown > 2*unknownMax || unknown == 0 || others != 1 || l.Stats().QueueBytes != 0 {
		t.Errorf("%d lines about unknown clients, %d others: %+v, %v, %+v", unknown, others, r, err, l.Stats())
	}
}

// TestBlockedRequestsWaitForRoomOrAreRefused: within the context of the request, and not while nothing can be written.
func TestBlockedRequestsWaitForRoomOrAreRefused(t *testing.T) {
	o := options(t)
	o.QueueBytes, o.Full = 2000, FullBlock
	full := withFullDisk(&o)
	l := mustOpen(t, o)
	for range 4 {
		if err := l.Admit(t.Context(), nil, 500); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := l.Admit(ctx, nil, 500); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a full queue: %v", err)
	}
	admitted := make(chan error, 1)
	go func() { admitted <- l.Admit(t.Context(), nil, 500) }()
	l.Write(event(1), 500)
	if err := <-admitted; err != nil {
		t.Error(err)
	}
	full.Store(true)
	l.Write(event(2), 500)
	eventually(t, "no error", func() bool { return l.Err() != nil })
	if err := l.Admit(t.Context(), nil, 10); !errors.Is(err, ErrUnavailable) {
		t.Errorf("a full disk: %v", err)
	}
	full.Store(false)
	eventually(t, "still failed", func() bool { return l.Err() == nil })
	for range 3 {
		l.Write(event(3), 500)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err := Verify([]string{o.Path}); err != nil || r.Lines != 7 || r.Dropped || l.Stats().QueueBytes != 0 {
		t.Errorf("%+v, %v, %+v", r, err, l.Stats())
	}
}

// TestLinesNameKeysAsConfigured: hashes by prefix, whole, or not at all.
func TestLinesNameKeysAsConfigured(t *testing.T) {
	one, other := Range{Lower: []byte("user/1"), Single: true}, Range{Lower: []byte("user/2"), Single: true}
	a, b := KeysHash.Name(&one), KeysHash.Name(&other)
	if a == b || a[:16] != b[:16] || strings.Contains(a, "user") || len(a) != 33 {
		t.Errorf("hashes %s and %s", a, b)
	}
	span := Range{Lower: []byte("a"), Upper: []byte{0xff}}
	if got := KeysWhole.Name(&span); got != "a..base16:ff" {
		t.Error(got)
	}
	e := event(1)
	e.Writes = []string{KeysWhole.Name(&one)}
	if line := string(e.append(nil, KeysWhole)); !strings.Contains(line, `"writes":["user/1"]`) {
		t.Error(line)
	}
	if line := string(e.append(nil, KeysNone)); KeysNone.Name(&one) != "" || strings.Contains(line, "user/1") {
		t.Error(line)
	}
}

// broken is a file of which single operations fail.
type broken struct {
	file
	longest       int          // bytes that a write may have; 0: any
	syncs, shorts atomic.Int32 // how many fail; shorts: of writes, of which a part stays
}

func (b *broken) Write(p []byte) (int, error) {
	if b.longest > 0 && len(p) > b.longest {
		return 0, syscall.ENOSPC
	}
	if b.shorts.Add(-1) >= 0 {
		n, _ := b.file.Write(p[:len(p)/2])
		return n, syscall.EIO
	}
	return b.file.Write(p)
}

func (b *broken) Truncate(size int64) error {
	if b.shorts.Load() >= 0 {
		return syscall.EIO
	}
	return b.file.Truncate(size)
}

func (b *broken) Sync() error {
	if b.syncs.Add(-1) >= 0 {
		return syscall.EIO
	}
	return b.file.Sync()
}

// withBroken makes all files of a log the same broken one.
func withBroken(o *Options) *broken {
	b := new(broken)
	o.openFile = func(path string) (f file, err error) {
		f, err = openFile(path)
		b.file = f
		return b, err
	}
	return b
}

// TestLinesLostAtTheEndAreKnown: a disk has room for the line that ends the log, and not for a request's.
func TestLinesLostAtTheEndAreKnown(t *testing.T) {
	o := options(t)
	b := withBroken(&o)
	l := mustOpen(t, o)
	b.longest = len(event(1).append(nil, KeysHash))
	l.Write(event(1), 0)
	l.Write(event(2), 0)
	if err := l.Close(); err == nil || l.Stats().Dropped != 2 || l.Stats().QueueBytes != 0 {
		t.Errorf("%v, %+v", err, l.Stats())
	}
	b.longest = 0
	write(t, o, 1)
	if r, err := Verify([]string{o.Path}); err != nil || r.Unclean != 1 {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestFailureAtARotationDoesNotEndTheLog: the sync of a full file fails once, and lines go on.
func TestFailureAtARotationDoesNotEndTheLog(t *testing.T) {
	o := options(t)
	o.FileBytes, o.Files = 600, 10
	b := withBroken(&o)
	l := mustOpen(t, o)
	b.syncs.Store(1)
	for i := range 6 {
		l.Write(event(i+1), 0)
	}
	eventually(t, "the log does not go on", func() bool { return l.Stats().Written >= 6 })
	if err := l.Close(); err != nil || l.Stats().Errors == 0 {
		t.Errorf("%v, %+v", err, l.Stats())
	}
	if r, err := Verify(files(t, o)); err != nil || r.Lines != 8 {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestPartOfALineIsRemovedBeforeTheNext: also if it could not be removed at once.
func TestPartOfALineIsRemovedBeforeTheNext(t *testing.T) {
	o := options(t)
	b := withBroken(&o)
	l := mustOpen(t, o)
	b.shorts.Store(1)
	l.Write(event(1), 0)
	eventually(t, "no error", func() bool { return l.Err() != nil })
	b.shorts.Store(-1)
	l.Write(event(2), 0)
	eventually(t, "nothing was written", func() bool { return l.Stats().Written == 2 })
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err := Verify([]string{o.Path}); err != nil || r.Lines != 4 {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestRoomIsThatOfTheLongestLine: keys of control bytes take six times their length, and a queue of them keeps its bound.
func TestRoomIsThatOfTheLongestLine(t *testing.T) {
	key := KeysWhole.Name(&Range{Lower: bytes.Repeat([]byte{1}, 256), Upper: bytes.Repeat([]byte{2}, 256)})
	e := event(1)
	e.User, e.Subject = strings.Repeat("\x01", 128), strings.Repeat("\x02", 128)
	for range RangesMax {
		e.Reads = append(e.Reads, key)
	}
	most := e.BytesMax(KeysWhole)
	e.More, e.Epoch, e.Took, e.Peer, e.Method = 1<<40, 1<<63, 1<<62, strings.Repeat("1", 64), strings.Repeat("M", 40)
	c := chain{number: 1 << 62}
	if got := len(c.line(nil, e.append(nil, KeysWhole), true)); got > most {
		t.Errorf("a line of %d bytes in a room of %d", got, most)
	}
}

// TestAFileThatWasTakenAwayDoesNotEndTheLog: an operator moves or deletes the file; once it would have been full, lines go to a new one.
func TestAFileThatWasTakenAwayDoesNotEndTheLog(t *testing.T) {
	for name, take := range map[string]func(path string) error{
		"moved":   func(path string) error { return os.Rename(path, path+".moved") },
		"deleted": os.Remove,
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t)
			o.FileBytes, o.Files, o.Full = 600, 10, FullBlock
			l := mustOpen(t, o)
			if err := take(o.Path); err != nil {
				t.Fatal(err)
			}
			for i := range 6 {
				l.Write(event(i+1), 0)
			}
			eventually(t, "the log does not go on", func() bool { return l.Stats().Written >= 6 })
			if err := l.Admit(t.Context(), nil, 10); err != nil {
				t.Error(err)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			r, err := Verify(files(t, o))
			if err != nil || r.Last != 8 || name == "moved" && r.Lines != 8 {
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
}

// TestALogBeginsOnAFullDisk: a server that is started again while the disk is full has lines to write once there is room, and is not kept
// from its start.
func TestALogBeginsOnAFullDisk(t *testing.T) {
	for _, way := range []Full{FullDrop, FullBlock} {
		for name, fill := range map[string]func(*Options) (empty func()){
			"writing": func(o *Options) func() {
				full := withFullDisk(o)
				full.Store(true)
				return func() { full.Store(false) }
			},
			"opening": func(o *Options) func() {
				full := new(atomic.Bool)
				full.Store(true)
				o.openFile = func(path string) (file, error) {
					if full.Load() {
						return nil, &os.PathError{Op: "open", Path: path, Err: syscall.EDQUOT}
					}
					return openFile(path)
				}
				return func() { full.Store(false) }
			},
		} {
			t.Run(string(way)+"/"+name, func(t *testing.T) {
				o := options(t)
				write(t, o, 3)
				if name == "writing" { // and the end of the server before was not clean
					text, _ := os.ReadFile(o.Path)
					if err := os.WriteFile(o.Path, text[:len(text)-3], 0o600); err != nil {
						t.Fatal(err)
					}
				}
				o.Full = way
				empty := fill(&o)
				l := mustOpen(t, o)
				if err := l.Err(); !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
					t.Errorf("the error of the log is %v", err)
				}
				if err := l.Admit(t.Context(), nil, 10); (err != nil) != (way == FullBlock) {
					t.Errorf("a request: %v", err)
				}
				empty()
				eventually(t, "nothing was written", func() bool { return l.Err() == nil })
				l.Write(event(1), 0)
				if err := l.Close(); err != nil {
					t.Fatal(err)
				}
				r, err := Verify([]string{o.Path})
				if want := map[string]int{"writing": 7, "opening": 8}[name]; err != nil || r.Lines != want || r.Dropped || r.Unclean != 8-want {
					t.Errorf("%+v, %v", r, err)
				}
			})
		}
	}
}

// TestALogIsARegularFile: a pipe, a device and a directory are refused at once.
func TestALogIsARegularFile(t *testing.T) {
	o := options(t)
	pipe := o.Path + ".pipe"
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{pipe, "/dev/full", filepath.Dir(o.Path)} {
		o.Path = path
		if _, err := Open(o); err == nil || !strings.Contains(err.Error(), "is not a regular file") {
			t.Errorf("%s: %v", path, err)
		}
	}
}
