package objectstore

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// impatient is a policy with which a target has stalled soon.
func impatient() Retry {
	policy := QuickRetry
	policy.Patience, policy.MinRate = 20*time.Millisecond, 1<<40
	return policy
}

// within fails the test if a call does not end.
func within(t *testing.T, call func() error) error {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- call() }()
	select {
	case err := <-ended:
		return err
	case <-time.After(20 * time.Second):
		t.Fatal("the call does not end")
		return nil
	}
}

func TestATargetThatStallsIsATemporaryFailure(t *testing.T) {
	inner, err := open(t.TempDir(), Options{})
	check(t, err)
	f := NewFaulty(inner)
	s := WithRetries(f, impatient())
	whole := bytes.Repeat([]byte("0123456789"), 100000)
	check(t, s.Create(t.Context(), "a", Bytes(whole)))
	for name, c := range map[string]struct {
		fault Fault
		call  func() error
	}{
		"in a read": {Fault{Op: OpRead, Kind: ReadStalls, Nth: 1, Bytes: 333333}, func() error {
			if !bytes.Equal(read(t, s, "a", 0, -1), whole) {
				return errors.New("the bytes differ")
			}
			return nil
		}},
		"before a read": {Fault{Op: OpRead, Kind: Slow, Nth: 1}, func() error {
			if !bytes.Equal(read(t, s, "a", 0, -1), whole) {
				return errors.New("the bytes differ")
			}
			return nil
		}},
		"in a list":              {Fault{Op: OpList, Kind: Slow, Nth: 1}, func() error { names(t, s, ""); return nil }},
		"while it takes content": {Fault{Op: OpCreate, Kind: Slow, Nth: 1}, func() error { return s.Create(t.Context(), "b", unsized{whole}) }},
	} {
		rule := f.Inject(c.fault)
		if err := within(t, c.call); err != nil || f.Fired(rule) != 1 {
			t.Errorf("a target that stalls %s: %v, fired %d times", name, err, f.Fired(rule))
		}
		f.Heal()
	}
}

// A target that always stalls is reported; a caller that gives up is told that, and not to try again.
func TestStallsUseUpTheAttempts(t *testing.T) {
	s, f := faulty(t)
	check(t, s.Create(t.Context(), "a", Bytes("content")))
	s = WithRetries(f, impatient())
	f.Inject(Fault{Op: OpRead, Kind: ReadStalls, Bytes: 3})
	err := within(t, func() error {
		r, err := s.Read(t.Context(), "a", 0, -1)
		check(t, err)
		_, err = io.ReadAll(r)
		return errors.Join(err, r.Close())
	})
	wantError(t, err, errTemporary)

	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(5*time.Millisecond, cancel)
	r, err := WithRetries(f, Retry{}).Read(ctx, "a", 3, -1)
	check(t, err)
	err = within(t, func() error { _, err := io.ReadAll(r); return err })
	if !errors.Is(err, context.Canceled) || isTemporary(err) {
		t.Fatalf("a read that was given up: %v", err)
	}
}

// The time that a caller takes between two reads, for an object of a list, or for content, is not the target's.
func TestASlowCallerIsNoStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the device may be slow
		inner, err := open(t.TempDir(), Options{})
		check(t, err)
		f := NewFaulty(inner)
		s := WithRetries(f, impatient())
		check(t, s.Create(t.Context(), "a", slowContent{}))
		r, err := s.Read(t.Context(), "a", 0, -1)
		check(t, err)
		time.Sleep(3 * impatient().Patience)
		got, err := io.ReadAll(r)
		check(t, err)
		check(t, r.Close())
		var all []string
		check(t, s.List(t.Context(), "", func(o Object) error {
			time.Sleep(3 * impatient().Patience)
			all = append(all, o.Name)
			return nil
		}))
		if string(got) != "slow" || !slices.Equal(all, []string{"a"}) || f.Calls(OpCreate) != 1 || f.Calls(OpRead) != 1 || f.Calls(OpList) != 1 {
			t.Fatalf("read %q, listed %v; %d, %d and %d calls", got, all, f.Calls(OpCreate), f.Calls(OpRead), f.Calls(OpList))
		}
	})
}

type slowContent struct{}

func (slowContent) Size() int64 { return -1 }

func (slowContent) Open() (io.ReadCloser, error) {
	return io.NopCloser(io.MultiReader(pausing{}, bytes.NewReader([]byte("slow")))), nil
}

// pausing is empty, slowly.
type pausing struct{}

func (pausing) Read([]byte) (int, error) {
	time.Sleep(3 * impatient().Patience)
	return 0, io.EOF
}

// TestABucketThatStopsSending: a bucket begins an answer and does not end it, as a network that drops packets looks.
func TestABucketThatStopsSending(t *testing.T) {
	server, options := startS3(t)
	stalls := make(chan struct{}, 1)
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			select {
			case <-stalls:
				w.Header().Set("Content-Length", "1000000")
				w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
				_, _ = w.Write([]byte("01234"))
				_ = http.NewResponseController(w).Flush()
				<-r.Context().Done()
				return
			default:
			}
		}
		server.ServeHTTP(w, r)
	}))
	t.Cleanup(h.Close)
	options.Endpoint = h.URL
	inner, err := open("s3://bucket", Options{S3: options})
	check(t, err)
	policy := impatient()
	policy.Patience = 300 * time.Millisecond
	s := WithRetries(inner, policy)
	whole := bytes.Repeat([]byte("0123456789"), 100000)
	check(t, s.Create(t.Context(), "a", Bytes(whole)))
	stalls <- struct{}{}
	check(t, within(t, func() error {
		if !bytes.Equal(read(t, s, "a", 0, -1), whole) {
			return errors.New("the bytes differ")
		}
		return nil
	}))
	stalls <- struct{}{}
	check(t, within(t, func() error {
		if all := names(t, s, ""); !slices.Equal(all, []string{"a:1000000"}) {
			t.Errorf("listed %v", all)
		}
		return nil
	}))
}
