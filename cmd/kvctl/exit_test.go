package main

import (
	"bytes"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client/clienttest"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/restore"
)

// TestDeniedTargetHasAnExitCodeOfItsOwn: a script can tell wrong credentials of a backup's target from other failures.
func TestDeniedTargetHasAnExitCodeOfItsOwn(t *testing.T) {
	err := fmt.Errorf("list s3://backups: %w: SignatureDoesNotMatch", objectstore.ErrDenied)
	if got := exitCode(err); got != exitDenied {
		t.Errorf("exit %d", got)
	}
	if got := (&app{}).advice(err); !strings.Contains(got, "AWS_SECRET_ACCESS_KEY") {
		t.Errorf("advice %q", got)
	}
}

// TestDamageOfTheLogArchiveIsCorruption, as docs/backup.md says of a drill, and so is all else that a restore refuses.
func TestDamageOfTheLogArchiveIsCorruption(t *testing.T) {
	for _, err := range []error{
		&archive.DamageError{File: "f", Reason: "the file is cut short"}, restore.ErrDamaged, &restore.LeftOutError{Backup: "x", Why: backup.ErrNoBackup},
	} {
		if got := exitCode(fmt.Errorf("from backup x: %w", err)); got != exitCorruption {
			t.Errorf("%v: exit %d", err, got)
		}
	}
}

// TestAdviceTellsOfAWriteThatMayHaveHappened: an answer is lost, and what the server says to the next attempt is about that one alone.
func TestAdviceTellsOfAWriteThatMayHaveHappened(t *testing.T) {
	lost := status.Error(codes.Unavailable, "the test cuts the connection")
	leaves := clienttest.NewError(codes.Unavailable, kvpb.ErrorReason_ERROR_REASON_SHUTTING_DOWN, "the test says so")
	late := clienttest.NewError(codes.DeadlineExceeded, kvpb.ErrorReason_ERROR_REASON_UNSPECIFIED, "the test says so")
	const may, nothing = "the write may", "nothing was written"
	for _, test := range []struct {
		args, stdin string
		first       error
		want, not   string
	}{
		{"put k v", "", lost, may, nothing},
		{"put k v", "", leaves, nothing, may},
		{"del k", "", lost, may, nothing},
		{"shell", "put k v\n", lost, may, nothing},
		{"get k", "", lost, "shutting down", may},
		{"shell", "get k\n", lost, "shutting down", may},
		{"put k v", "", late, may, "If the command"},
		{"get k", "", late, "If the command", may},
	} {
		server := clienttest.Start(t)
		server.FailNext(append([]error{test.first}, slices.Repeat([]error{leaves}, 20)...)...)
		var errs bytes.Buffer
		a := &app{in: strings.NewReader(test.stdin), out: &bytes.Buffer{}, err: &errs, getenv: func(string) string { return "" }}
		code := a.run(t.Context(), append(strings.Fields(test.args), "--endpoint", server.Endpoint))
		if got := errs.String(); code != exitUnavailable || !strings.Contains(got, test.want) || strings.Contains(got, test.not) {
			t.Errorf("%s %q after %v: exit code %d, %s", test.args, test.stdin, test.first, code, got)
		}
	}
	unanswered := clienttest.Start(t)
	unanswered.FailNext(slices.Repeat([]error{lost}, 20)...)
	if code, _, errs := kvctl(t.Context(), unanswered, "put", "k", "v", "-o", "json"); code != exitUnavailable || !strings.Contains(errs, may) || !strings.Contains(errs, `"outcome_unknown":true`) {
		t.Errorf("exit code %d, %s", code, errs)
	}
}

// TestAdviceTellsOfAChangeThatMayHaveHappened: the same of what changes no keys, of which only some requests are repeated.
func TestAdviceTellsOfAChangeThatMayHaveHappened(t *testing.T) {
	lost := status.Error(codes.Unavailable, "the test cuts the connection")
	leaves := clienttest.NewError(codes.Unavailable, kvpb.ErrorReason_ERROR_REASON_SHUTTING_DOWN, "the test says so")
	const may, nothing = "the change may", "nothing was written"
	for _, test := range []struct {
		args      string
		first     error
		want, not string
	}{
		{"role update reader --grant r:", lost, may, nothing},
		{"user delete bob", lost, may, nothing},
		{"user delete bob", leaves, nothing, may},
		{"user list", lost, "shutting down", may},
	} {
		t.Run(test.args, func(t *testing.T) {
			t.Parallel() // the pauses between attempts
			_, errs, code := runWith(t, nil, append(strings.Fields(test.args), "-o", "json", "--endpoint", refusingServer(t, test.first, leaves))...)
			unknown := strings.Contains(errs, `"outcome_unknown":true`)
			if code != exitUnavailable || !strings.Contains(errs, test.want) || strings.Contains(errs, test.not) || unknown != (test.want == may) {
				t.Errorf("after %v: exit code %d, %s", test.first, code, errs)
			}
		})
	}
}

// TestAdviceOfAChangeWithAnUnknownOutcome names no key.
func TestAdviceOfAChangeWithAnUnknownOutcome(t *testing.T) {
	unknown := clienttest.NewError(codes.Internal, kvpb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN, "the test says so")
	_, errs, code := runWith(t, nil, "user", "delete", "bob", "--endpoint", refusingServer(t, unknown, unknown))
	if code != exitError || !strings.Contains(errs, "The change may or may not have happened. Look at what there is") {
		t.Errorf("exit code %d, %s", code, errs)
	}
}

// refusingServer ends the first call with one error, and all others with another.
func refusingServer(t *testing.T, first, others error) (endpoint string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var calls atomic.Int64
	g := grpc.NewServer(grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error {
		if calls.Add(1) == 1 {
			return first
		}
		return others
	}))
	go func() { _ = g.Serve(listener) }() // ends with Stop
	t.Cleanup(g.Stop)
	return listener.Addr().String()
}

// TestChangesAreCommands that exist.
func TestChangesAreCommands(t *testing.T) {
	var paths []string
	for _, cmd := range commands(newExampleRoot()) {
		paths = append(paths, strings.TrimPrefix(cmd.CommandPath(), "kvctl "))
	}
	for _, name := range append(slices.Clone(changes), singleWrites...) {
		if !slices.Contains(paths, name) {
			t.Errorf("there is no command %s", name)
		}
	}
}
