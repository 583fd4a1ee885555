package objectstore

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// TestAURLHasNoCredentials, and the error does not show them.
func TestAURLHasNoCredentials(t *testing.T) {
	for _, url := range []string{"s3://key:secret@bucket/prefix", "s3://key:sec/secret@bucket", "s3://secret@bucket"} {
		if _, err := Open(url, Options{}); !errors.Is(err, ErrURL) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", url, err)
		}
	}
}

// TestAServiceOfCredentialsThatStallsHoldsUpNoCall: neither the one that asks it, nor those after that. It stops in the middle of an answer.
func TestAServiceOfCredentialsThatStallsHoldsUpNoCall(t *testing.T) {
	asked, stalled := make(chan struct{}, 10), make(chan struct{})
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte("{"))
		w.(http.Flusher).Flush()
		asked <- struct{}{}
		select {
		case <-stalled:
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(func() {
		close(stalled)
		service.Close()
	})
	for _, name := range []string{
		"AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SECRET_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
		"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL",
	} {
		t.Setenv(name, "")
	}
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", "/does/not/exist")
	t.Setenv("AWS_CONFIG_FILE", "/does/not/exist")
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", service.URL)
	s, err := open("s3://bucket", Options{S3: S3Options{Region: "us-east-1", credentialsTime: 300 * time.Millisecond}}) // of AWS, which is never asked
	check(t, err)
	for range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.Delete(ctx, "a") }()
		select {
		case <-asked:
			cancel()
		case <-time.After(100 * time.Millisecond): // the first one is being asked
			cancel()
		}
		if err := within(t, func() error { return <-ended }); !errors.Is(err, context.Canceled) {
			t.Errorf("a call that is given up: %v", err)
		}
	}
}
