package objectstore

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7/pkg/credentials"
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
	noCredentials(t)
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

// TestAProgramForCredentialsThatHangsHoldsUpNoCall: the library runs credential_process of a profile, and does not end it.
func TestAProgramForCredentialsThatHangsHoldsUpNoCall(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	check(t, syscall.Mkfifo(in("pipe"), 0o600))
	check(t, os.WriteFile(in("program"), []byte("cat "+in("pipe")+"\ntouch "+in("ended")+"\n"), 0o600))
	check(t, os.WriteFile(in("credentials"), []byte("[default]\ncredential_process = sh "+in("program")+"\n"), 0o600))
	noCredentials(t)
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", in("credentials"))
	s, err := open("s3://bucket", Options{S3: S3Options{Endpoint: "http://127.0.0.1:1", Region: "us-east-1", credentialsTime: 50 * time.Millisecond}})
	check(t, err)
	for range 2 {
		if err := within(t, func() error { return s.Delete(t.Context(), "a") }); err == nil {
			t.Error("a call without credentials has succeeded, at an endpoint where nothing listens")
		}
	}
	for _, err := os.Stat(in("ended")); err != nil; _, err = os.Stat(in("ended")) { // the program reads the end of the pipe, and ends
		end, err := os.OpenFile(in("pipe"), os.O_RDWR|syscall.O_NONBLOCK, 0)
		check(t, err)
		check(t, end.Close())
		time.Sleep(time.Millisecond)
	}
}

// TestCredentialsAreAskedForWhenTheyHaveExpired, and each time if it is not known when they do: a file may be replaced.
func TestCredentialsAreAskedForWhenTheyHaveExpired(t *testing.T) {
	for _, c := range []struct {
		name    string
		expires time.Time
		want    int
	}{{"in an hour", time.Now().Add(time.Hour), 1}, {"an hour ago", time.Now().Add(-time.Hour), 3}, {"not known", time.Time{}, 3}} {
		inner := &countedProvider{value: credentials.Value{AccessKeyID: "key", SecretAccessKey: "secret", Expiration: c.expires}}
		of := credentials.NewChainCredentials([]credentials.Provider{newBoundedProvider(inner, time.Minute)})
		for range 3 {
			if v, err := of.GetWithContext(nil); err != nil || v.AccessKeyID != "key" {
				t.Errorf("%s: %+v, %v", c.name, v, err)
			}
		}
		if inner.asked != c.want {
			t.Errorf("%s: asked %d times, want %d", c.name, inner.asked, c.want)
		}
	}
}

// countedProvider counts how often it is asked.
type countedProvider struct {
	credentials.Expiry
	value credentials.Value
	asked int
}

// RetrieveWithCredContext implements credentials.Provider.
func (p *countedProvider) RetrieveWithCredContext(*credentials.CredContext) (credentials.Value, error) {
	p.asked++
	return p.value, nil
}

// Retrieve implements credentials.Provider.
func (p *countedProvider) Retrieve() (credentials.Value, error) {
	return p.RetrieveWithCredContext(nil)
}

// noCredentials takes away what the environment has for AWS.
func noCredentials(t *testing.T) {
	for _, name := range []string{
		"AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SECRET_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
		"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE",
	} {
		t.Setenv(name, "")
	}
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", "/does/not/exist")
	t.Setenv("AWS_CONFIG_FILE", "/does/not/exist")
}
