package objectstore

import (
	"bytes"
	"io"
	"net/http"
	"testing"
)

// TestAnswersOfABucketHaveABound: a target that sends a list, or the end of an upload in parts, without an end does not fill the memory.
func TestAnswersOfABucketHaveABound(t *testing.T) {
	server, options := startS3(t)
	b, err := newBucket("bucket", "", options)
	check(t, err)
	b.partBytes = 64 << 10
	const most = 16 * answerBytesMax // more than fits into the buffers of a connection
	taken := make(chan int, 1)
	for _, c := range []struct {
		name, begin string
		status      int
		ask         func() error
		answers     func(*http.Request) bool
	}{
		{
			"a list", "<ListBucketResult><Contents><Key>", http.StatusOK, func() error { return b.List(t.Context(), "", func(Object) error { return nil }) },
			func(r *http.Request) bool { return r.Method == http.MethodGet },
		},
		{
			"the end of an upload", "<CompleteMultipartUploadResult><Bucket>", http.StatusOK, func() error { return b.Create(t.Context(), "object", unsized{make([]byte, 100<<10)}) },
			func(r *http.Request) bool { return r.Method == http.MethodPost && r.URL.Query().Has("uploadId") },
		},
		{
			"an error", "<Error><Message>", http.StatusForbidden, func() error {
				_, err := b.Read(t.Context(), "object", 0, -1)
				return err
			},
			func(r *http.Request) bool { return r.Method == http.MethodGet },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			server.fail = func(w http.ResponseWriter, r *http.Request) bool {
				if !c.answers(r) {
					return false
				}
				piece, sent := bytes.Repeat([]byte("a"), 64<<10), 0
				w.WriteHeader(c.status)
				_, err := io.WriteString(w, c.begin)
				for err == nil && sent < most {
					_, err = w.Write(piece)
					sent += len(piece)
				}
				taken <- sent
				return true
			}
			if c.ask() == nil { // the client library has its own error for what is cut off
				t.Error("it has an answer")
			}
			if sent := <-taken; sent >= most {
				t.Errorf("the client has taken %d bytes and more", sent)
			}
		})
	}
}

// TestObjectsMayBeLongerThanAnswers: their content is read piece by piece.
func TestObjectsMayBeLongerThanAnswers(t *testing.T) {
	_, options := startS3(t)
	s, err := Open("s3://bucket", Options{S3: options})
	check(t, err)
	content := make([]byte, answerBytesMax+1)
	check(t, s.Create(t.Context(), "x", Bytes(content)))
	if got := read(t, s, "x", 0, -1); !bytes.Equal(got, content) {
		t.Errorf("%d bytes of %d", len(got), len(content))
	}
}
