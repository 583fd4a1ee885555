package objectstore

import (
	"bufio"
	"crypto/md5"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// s3Server is as much of the S3 protocol as the client needs, in memory. `make test-s3` runs the same tests against a server of
// others.
type s3Server struct {
	mu      sync.Mutex
	objects map[string][]byte
	parts   map[string][]byte // of uploads in parts
	pageMax int
	fail    func(w http.ResponseWriter, r *http.Request) bool // true if it has answered
}

func startS3(t *testing.T) (*s3Server, S3Options) {
	s := &s3Server{objects: map[string][]byte{}, parts: map[string][]byte{}, pageMax: 3}
	h := httptest.NewServer(s)
	t.Cleanup(h.Close)
	return s, S3Options{Endpoint: h.URL, AccessKey: "user", SecretKey: "secret12"}
}

func (s *s3Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	bucket, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	query := r.URL.Query()
	switch {
	case s.fail != nil && s.fail(w, r):
	case bucket != "bucket":
		s3Error(w, http.StatusNotFound, "NoSuchBucket")
	case r.Method == http.MethodGet && key == "":
		s.list(w, query.Get("prefix"), query.Get("continuation-token"))
	case r.Method == http.MethodGet || r.Method == http.MethodHead:
		s.get(w, r, key)
	case r.Method == http.MethodPut && query.Get("uploadId") != "":
		if body, ok := readBody(r); ok {
			s.parts[key+"#"+query.Get("partNumber")] = body
			w.Header().Set("ETag", etag(body))
		}
	case r.Method == http.MethodPut:
		if body, ok := readBody(r); ok {
			s.put(w, r, key, body)
		}
	case r.Method == http.MethodPost && query.Has("uploads"):
		fmt.Fprintf(w, `<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>`)
	case r.Method == http.MethodPost:
		s.complete(w, r, key)
	case r.Method == http.MethodDelete:
		if query.Get("uploadId") == "" {
			delete(s.objects, key)
		}
		w.WriteHeader(http.StatusNoContent)
	}
}

func (s *s3Server) put(w http.ResponseWriter, r *http.Request, key string, body []byte) bool {
	if _, ok := s.objects[key]; ok && r.Header.Get("If-None-Match") == "*" {
		s3Error(w, http.StatusPreconditionFailed, "PreconditionFailed")
		return false
	}
	s.objects[key] = body
	w.Header().Set("ETag", etag(body))
	return true
}

func (s *s3Server) complete(w http.ResponseWriter, r *http.Request, key string) {
	var whole []byte
	for n := 1; ; n++ {
		part, ok := s.parts[key+"#"+strconv.Itoa(n)]
		if !ok {
			break
		}
		whole = append(whole, part...)
	}
	clear(s.parts)
	if s.put(w, r, key, whole) {
		fmt.Fprintf(w, `<CompleteMultipartUploadResult><Bucket>bucket</Bucket><ETag>%s</ETag></CompleteMultipartUploadResult>`, etag(whole))
	}
}

func (s *s3Server) get(w http.ResponseWriter, r *http.Request, key string) {
	body, ok := s.objects[key]
	if !ok {
		s3Error(w, http.StatusNotFound, "NoSuchKey")
		return
	}
	w.Header().Set("ETag", etag(body))
	w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
	http.ServeContent(w, r, "", time.Time{}, strings.NewReader(string(body)))
}

func (s *s3Server) list(w http.ResponseWriter, prefix, after string) {
	var keys []string
	for key := range s.objects {
		if strings.HasPrefix(key, prefix) && key > after {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	more := len(keys) > s.pageMax
	keys = keys[:min(len(keys), s.pageMax)]
	fmt.Fprint(w, `<ListBucketResult>`)
	for _, key := range keys {
		fmt.Fprintf(w, `<Contents><Key>%s</Key><Size>%d</Size><LastModified>%s</LastModified></Contents>`, key, len(s.objects[key]), time.Now().UTC().Format(time.RFC3339))
	}
	if more {
		fmt.Fprintf(w, `<IsTruncated>true</IsTruncated><NextContinuationToken>%s</NextContinuationToken>`, keys[len(keys)-1])
	}
	fmt.Fprint(w, `</ListBucketResult>`)
}

// readBody reads the body of a PUT, which is in signed chunks without encryption. A body that breaks off is none.
func readBody(r *http.Request) (body []byte, whole bool) {
	if !strings.HasPrefix(r.Header.Get("X-Amz-Content-Sha256"), "STREAMING") {
		body, err := io.ReadAll(r.Body)
		return body, err == nil
	}
	in := bufio.NewReader(r.Body)
	for {
		line, err := in.ReadString('\n')
		size, _, _ := strings.Cut(strings.TrimSpace(line), ";")
		n, bad := strconv.ParseInt(size, 16, 64)
		if err != nil || bad != nil || n == 0 {
			return body, err == nil && bad == nil
		}
		chunk := make([]byte, n+2) // and the end of the line
		if _, err := io.ReadFull(in, chunk); err != nil {
			return nil, false
		}
		body = append(body, chunk[:n]...)
	}
}

func etag(body []byte) string {
	sum := md5.Sum(body)
	return `"` + hex.EncodeToString(sum[:]) + `"`
}

func s3Error(w http.ResponseWriter, status int, code string) {
	w.WriteHeader(status)
	_ = xml.NewEncoder(w).Encode(struct {
		XMLName xml.Name `xml:"Error"`
		Code    string
		Message string
	}{Code: code, Message: "of the test's server"})
}
