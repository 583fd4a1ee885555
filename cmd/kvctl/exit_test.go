package main

import (
	"fmt"
	"strings"
	"testing"

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
