package objectstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// s3Endpoint is set by `make test-s3`, which has started a server there with the usual variables of the environment.
var s3Endpoint = os.Getenv("EPOCHKV_TEST_S3_ENDPOINT")

// eachStore runs a test with each kind of store, below the retries.
func eachStore(t *testing.T, run func(t *testing.T, s Store)) {
	t.Run("directory", func(t *testing.T) {
		s, err := open("file://"+t.TempDir()+"/a/b", Options{})
		check(t, err)
		run(t, s)
	})
	t.Run("bucket", func(t *testing.T) {
		_, options := startS3(t)
		s, err := newBucket("bucket", "a/b", options)
		check(t, err)
		s.partBytes = 64 << 10 // real stores want 5 MiB or more
		run(t, s)
	})
	if s3Endpoint == "" {
		return
	}
	t.Run("real", func(t *testing.T) {
		s, err := open(fmt.Sprintf("s3://epochkv-test/%d", time.Now().UnixNano()), Options{S3: S3Options{Endpoint: s3Endpoint}})
		check(t, err)
		run(t, s)
	})
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantError(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
}

// unsized is content whose size is not known before it ends.
type unsized struct{ Bytes }

func (unsized) Size() int64 { return -1 }

func read(t *testing.T, s Store, name string, offset, length int64) []byte {
	t.Helper()
	r, err := s.Read(t.Context(), name, offset, length)
	check(t, err)
	defer r.Close()
	p, err := io.ReadAll(r)
	check(t, err)
	return p
}

func names(t *testing.T, s Store, prefix string) (all []string) {
	t.Helper()
	check(t, s.List(t.Context(), prefix, func(o Object) error {
		all = append(all, fmt.Sprintf("%s:%d", o.Name, o.Size))
		if age := time.Since(o.Created); age < -time.Minute || age > time.Hour {
			t.Errorf("%s was created %v ago", o.Name, age)
		}
		return nil
	}))
	return all
}

func TestCreateNeverReplacesAnObject(t *testing.T) {
	eachStore(t, func(t *testing.T, s Store) {
		check(t, s.Create(t.Context(), "x/first", Bytes("one")))
		wantError(t, s.Create(t.Context(), "x/first", Bytes("other")), ErrExists)
		wantError(t, s.Create(t.Context(), "x/first", unsized{Bytes("other")}), ErrExists)
		if got := read(t, s, "x/first", 0, -1); string(got) != "one" {
			t.Fatalf("the object is %q", got)
		}
	})
}

func TestOneOfManyCreatorsWins(t *testing.T) {
	eachStore(t, func(t *testing.T, s Store) {
		var won atomic.Int32
		var winner atomic.Value
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				content := Bytes(strings.Repeat(fmt.Sprint(i), 10000))
				switch err := s.Create(t.Context(), "same", content); {
				case err == nil:
					won.Add(1)
					winner.Store(string(content))
				case !errors.Is(err, ErrExists) && !errors.Is(err, errTemporary):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if won.Load() != 1 || string(read(t, s, "same", 0, -1)) != winner.Load() {
			t.Fatalf("%d creators won", won.Load())
		}
	})
}

// An object that is uploaded in parts becomes one under the same condition.
func TestLargeStreamsNeverReplaceAnObject(t *testing.T) {
	eachStore(t, func(t *testing.T, s Store) {
		size := 64 << 10
		if b, ok := s.(*bucket); ok {
			size = b.partBytes
		}
		large := bytes.Repeat([]byte("0123456789abcdef"), size/16+1)
		check(t, s.Create(t.Context(), "streamed", unsized{large}))
		wantError(t, s.Create(t.Context(), "streamed", unsized{bytes.Repeat([]byte("x"), size+5)}), ErrExists)
		if !bytes.Equal(read(t, s, "streamed", 0, -1), large) {
			t.Fatal("the object does not read back")
		}
	})
}

func TestObjectsAreReadAndListedAsTheyWereCreated(t *testing.T) {
	eachStore(t, func(t *testing.T, s Store) {
		if all := names(t, s, ""); all != nil {
			t.Fatalf("a new store has %v", all)
		}
		large := bytes.Repeat([]byte("0123456789abcdef"), 20000)
		for _, name := range []string{"a/x", "a-b", "a.b/c", "a0", "b/deep/er", "z"} {
			check(t, s.Create(t.Context(), name, Bytes(name)))
		}
		check(t, s.Create(t.Context(), "large", Bytes(large)))
		check(t, s.Create(t.Context(), "streamed", unsized{Bytes(large)}))
		check(t, s.Create(t.Context(), "empty", Bytes(nil)))
		want := []string{"a-b:3", "a.b/c:5", "a/x:3", "a0:2", "b/deep/er:9", "empty:0", "large:320000", "streamed:320000", "z:1"}
		if all := names(t, s, ""); !slices.Equal(all, want) {
			t.Fatalf("listed %v, want %v", all, want)
		}
		if all := names(t, s, "a/"); !slices.Equal(all, []string{"a/x:3"}) {
			t.Fatalf("listed %v", all)
		}
		if all := names(t, s, "b/de"); !slices.Equal(all, []string{"b/deep/er:9"}) {
			t.Fatalf("listed %v", all)
		}
		for _, name := range []string{"large", "streamed"} {
			if !bytes.Equal(read(t, s, name, 0, -1), large) || !bytes.Equal(read(t, s, name, 16, 33), large[16:49]) || !bytes.Equal(read(t, s, name, 319990, -1), large[319990:]) {
				t.Fatalf("%s does not read back", name)
			}
		}
		if len(read(t, s, "large", 5, 0)) != 0 || len(read(t, s, "empty", 0, -1)) != 0 {
			t.Fatal("an empty range has bytes")
		}
	})
}

func TestMissingAndShortObjectsAreNamedErrors(t *testing.T) {
	eachStore(t, func(t *testing.T, s Store) {
		_, err := s.Read(t.Context(), "none", 0, -1)
		wantError(t, err, ErrNotFound)
		_, err = s.Read(t.Context(), "none", 0, 0)
		wantError(t, err, ErrNotFound)
		check(t, s.Create(t.Context(), "short", Bytes("12345")))
		for _, span := range [][2]int64{{0, 6}, {4, 2}, {6, 1}} {
			_, err = s.Read(t.Context(), "short", span[0], span[1])
			wantError(t, err, ErrShort)
		}
		for _, name := range []string{"", "/x", "x/", "../x", "a/../b", "a//b", ".hidden", "a/.b", "ä", "a b", strings.Repeat("a", nameBytesMax+1)} {
			wantError(t, s.Create(t.Context(), name, Bytes("x")), ErrName)
			_, err := s.Read(t.Context(), name, 0, -1)
			wantError(t, err, ErrName)
			wantError(t, s.Delete(t.Context(), name), ErrName)
		}
	})
}

func TestDeletedObjectsAreGone(t *testing.T) {
	eachStore(t, func(t *testing.T, s Store) {
		check(t, s.Create(t.Context(), "a/b/c", Bytes("1")))
		check(t, s.Create(t.Context(), "a/d", Bytes("2")))
		check(t, s.Delete(t.Context(), "a/b/c"))
		check(t, s.Delete(t.Context(), "a/b/c"))
		if all := names(t, s, ""); !slices.Equal(all, []string{"a/d:1"}) {
			t.Fatalf("left: %v", all)
		}
		check(t, s.Create(t.Context(), "a/b/c", Bytes("again")))
		if got := read(t, s, "a/b/c", 0, -1); string(got) != "again" {
			t.Fatalf("read %q", got)
		}
	})
}

func TestACancelledCallLeavesNoObject(t *testing.T) {
	eachStore(t, func(t *testing.T, s Store) {
		ctx, cancel := context.WithCancel(t.Context())
		err := s.Create(ctx, "partial", &stopping{cancel: cancel})
		wantError(t, err, context.Canceled)
		if all := names(t, s, ""); all != nil {
			t.Fatalf("a cancelled creation left %v", all)
		}
	})
}

// stopping cancels in the middle of its content.
type stopping struct {
	cancel func()
	read   int64
}

func (c *stopping) Open() (io.ReadCloser, error) { return c, nil }
func (c *stopping) Size() int64                  { return 1 << 20 }
func (c *stopping) Close() error                 { return nil }
func (c *stopping) Read(p []byte) (int, error) {
	if c.read += int64(len(p)); c.read > c.Size()/2 {
		c.cancel()
		time.Sleep(10 * time.Millisecond)
	}
	return len(p), nil
}

func TestAnUnfinishedFileIsNoObject(t *testing.T) {
	root := t.TempDir()
	s, err := Open(root, Options{Retry: QuickRetry})
	check(t, err)
	wantError(t, s.Create(t.Context(), "x", &failing{}), errFailing)
	if all := names(t, s, ""); all != nil {
		t.Fatalf("left %v", all)
	}
	left, _ := os.ReadDir(filepath.Join(root, incompleteDir))
	if len(left) != 0 {
		t.Fatalf("left %v", left)
	}
	old := filepath.Join(root, incompleteDir, "object-1")
	check(t, os.WriteFile(old, nil, 0o600))
	check(t, os.Chtimes(old, time.Time{}, time.Now().Add(-2*incompleteLifetime)))
	names(t, s, "")
	if _, err := os.Stat(old); err == nil {
		t.Fatal("a file that a crash left remains")
	}
}

var errFailing = errors.New("the source fails")

type failing struct{}

func (*failing) Open() (io.ReadCloser, error) { return io.NopCloser(&failing{}), nil }
func (*failing) Size() int64                  { return -1 }
func (*failing) Read([]byte) (int, error)     { return 0, errFailing }

func TestURLsOfNoStoreAreRefused(t *testing.T) {
	for _, target := range []string{"", "ftp://x", "s3://", "s3:///x", "file://host/x", "file:///x?y", "s3://b/../x"} {
		_, err := Open(target, Options{})
		wantError(t, err, ErrURL)
	}
	for _, endpoint := range []string{"x", "ftp://x", "http://", "https://x/y"} {
		_, err := Open("s3://bucket", Options{S3: S3Options{Endpoint: endpoint}})
		wantError(t, err, ErrURL)
	}
}

func TestAnswersOfTheStoreAreClassified(t *testing.T) {
	server, options := startS3(t)
	s, err := open("s3://bucket", Options{S3: options})
	check(t, err)
	var answer func(w http.ResponseWriter)
	server.fail = func(w http.ResponseWriter, _ *http.Request) bool { answer(w); return true }
	for _, c := range []struct {
		status int
		code   string
		want   error
	}{
		{http.StatusForbidden, "AccessDenied", ErrDenied},
		{http.StatusBadRequest, "ExpiredToken", ErrDenied},
		{http.StatusBadRequest, "InvalidToken", ErrDenied},
		{http.StatusServiceUnavailable, "SlowDown", errTemporary},
		{http.StatusInternalServerError, "InternalError", errTemporary},
		{http.StatusConflict, "ConditionalRequestConflict", errTemporary},
		{http.StatusPreconditionFailed, "PreconditionFailed", ErrExists},
		{http.StatusTooManyRequests, "TooManyRequests", errTemporary},
	} {
		answer = func(w http.ResponseWriter) { s3Error(w, c.status, c.code) }
		wantError(t, s.Create(t.Context(), "x", Bytes("x")), c.want)
	}
	answer = func(w http.ResponseWriter) { s3Error(w, http.StatusNotFound, "NoSuchBucket") }
	if err := s.Create(t.Context(), "x", Bytes("x")); isTemporary(err) || errors.Is(err, ErrNotFound) {
		t.Fatalf("a missing bucket is %v", err)
	}
	answer = func(http.ResponseWriter) { panic(http.ErrAbortHandler) }
	wantError(t, s.Create(t.Context(), "x", Bytes("x")), errTemporary)
}

// Stores answer 404 for other reasons, too: Versity's does so for an access key that it does not know. A deletion would seem to have
// succeeded, and an object that exists to be missing.
func TestOnlyAMissingObjectIsNotFound(t *testing.T) {
	server, options := startS3(t)
	s, err := open("s3://bucket", Options{S3: options})
	check(t, err)
	check(t, s.Create(t.Context(), "x", Bytes("x")))
	for code, want := range map[string]error{"XAdminUserNotFound": ErrDenied, "NoSuchUpload": nil, "NoSuchTenant": nil} {
		server.fail = func(w http.ResponseWriter, _ *http.Request) bool { s3Error(w, http.StatusNotFound, code); return true }
		_, failed := s.Read(t.Context(), "x", 0, -1)
		for _, err := range []error{failed, s.Create(t.Context(), "y", Bytes("y")), s.Delete(t.Context(), "x"), s.List(t.Context(), "", nil)} {
			if err == nil || errors.Is(err, ErrNotFound) || isTemporary(err) || want != nil && !errors.Is(err, want) {
				t.Errorf("%s: %v", code, err)
			}
		}
	}
	server.fail = nil
	if all := names(t, s, ""); !slices.Equal(all, []string{"x:1"}) {
		t.Errorf("left: %v", all)
	}
	check(t, s.Delete(t.Context(), "x"))
	_, err = s.Read(t.Context(), "x", 0, -1)
	wantError(t, err, ErrNotFound)
}

// unmeasured is an answer without its length, as proxies send it that pass on what they get piece by piece.
type unmeasured struct{ http.ResponseWriter }

func (w unmeasured) WriteHeader(status int) {
	w.Header().Del("Content-Length")
	w.ResponseWriter.WriteHeader(status)
	w.ResponseWriter.(http.Flusher).Flush()
}

// TestAnswersNeedNoLength: what an answer does not say is found out otherwise.
func TestAnswersNeedNoLength(t *testing.T) {
	server, options := startS3(t)
	s, err := Open("s3://bucket", Options{S3: options, Retry: QuickRetry})
	check(t, err)
	content := "0123456789"
	check(t, s.Create(t.Context(), "x", Bytes(content)))
	server.fail = func(w http.ResponseWriter, r *http.Request) bool {
		_, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		if key == "" {
			return false
		}
		server.get(unmeasured{w}, r, key)
		return true
	}
	for _, c := range []struct{ offset, length int64 }{{0, -1}, {3, -1}, {0, 10}, {2, 3}, {9, 1}, {0, 0}, {3, 0}, {10, 0}} {
		want := content[c.offset:]
		if c.length >= 0 {
			want = want[:c.length]
		}
		if got := read(t, s, "x", c.offset, c.length); string(got) != want {
			t.Errorf("%d bytes from %d: %q", c.length, c.offset, got)
		}
	}
	for _, c := range []struct{ offset, length int64 }{{0, 11}, {9, 2}, {10, 1}, {11, 0}, {20, 0}} {
		_, err := s.Read(t.Context(), "x", c.offset, c.length)
		wantError(t, err, ErrShort)
	}
	_, err = s.Read(t.Context(), "y", 0, 0)
	wantError(t, err, ErrNotFound)
}

// TestAnUploadThatWasGivenUpDoesNotWaitForItsTarget: a store that does not answer to the removal of what was uploaded delays nothing for long.
func TestAnUploadThatWasGivenUpDoesNotWaitForItsTarget(t *testing.T) {
	t.Parallel()
	server, options := startS3(t)
	b, err := newBucket("bucket", "", options)
	check(t, err)
	b.partBytes = 64 << 10
	ctx, giveUp := context.WithCancel(t.Context())
	server.fail = func(_ http.ResponseWriter, r *http.Request) bool {
		switch {
		case r.Method == http.MethodPut && r.URL.Query().Get("uploadId") != "":
			giveUp()
		case r.Method != http.MethodDelete:
			return false
		}
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
		return true
	}
	ended := make(chan error, 1)
	go func() { ended <- b.Create(ctx, "object", unsized{make([]byte, 100<<10)}) }()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the upload does not end")
	}
}
