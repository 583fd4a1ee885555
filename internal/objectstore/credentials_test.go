package objectstore

import (
	"errors"
	"strings"
	"testing"
)

// TestAURLHasNoCredentials, and the error does not show them.
func TestAURLHasNoCredentials(t *testing.T) {
	for _, url := range []string{"s3://key:secret@bucket/prefix", "s3://key:sec/secret@bucket", "s3://secret@bucket"} {
		if _, err := Open(url, Options{}); !errors.Is(err, ErrURL) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", url, err)
		}
	}
}
