package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client/clienttest"
	"github.com/epochkv/epochkv/internal/objectstore"
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

// TestAdviceTellsOfAWriteThatMayHaveHappened: an answer is lost, and what the server says to the next attempt is about that one alone.
func TestAdviceTellsOfAWriteThatMayHaveHappened(t *testing.T) {
	lost := status.Error(codes.Unavailable, "the test cuts the connection")
	leaves := clienttest.NewError(codes.Unavailable, kvpb.ErrorReason_ERROR_REASON_SHUTTING_DOWN, "the test says so")
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
