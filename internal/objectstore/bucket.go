package objectstore

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// S3Options say where a bucket is, and with what credentials it is reached. Empty fields are taken from the environment, as
// the tools of AWS do it: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or AWS_DEFAULT_REGION, AWS_CA_BUNDLE,
// AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the file of credentials with AWS_PROFILE, or the service of
// the machine.
type S3Options struct {
	Endpoint  string // https://HOST[:PORT], or http:// without encryption
	Region    string
	AccessKey string
	SecretKey string
	CAFile    string // certificates that the endpoint's must be issued by, as PEM

	credentialsTime time.Duration // of tests; 0: credentialsTimeout
}

const (
	awsEndpoint   = "https://s3.amazonaws.com"
	defaultRegion = "us-east-1" // of stores of other makers, which ignore it

	// streamPartBytes is the memory that the upload of an object of unknown size takes. Larger objects of unknown size are
	// uploaded in parts.
	streamPartBytes = 16 << 20
	singlePutMax    = 5 << 30 // larger objects of known size are uploaded in parts
)

// bucket is a store in a bucket.
type bucket struct {
	client       minio.Core
	name, prefix string // the prefix is empty or ends with '/'
	partBytes    int    // memory of an upload in parts
}

func newBucket(name, prefix string, o S3Options) (*bucket, error) {
	if name == "" {
		return nil, fmt.Errorf("%w: s3:// without a bucket; expected s3://BUCKET/PREFIX", ErrURL)
	}
	if strings.ContainsAny(name, ":@") { // not shown: it is a secret, in logs and in the state of the server
		return nil, fmt.Errorf("%w: a bucket has neither : nor @; expected s3://BUCKET/PREFIX, with credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", ErrURL)
	}
	if prefix != "" {
		if err := checkName(prefix); err != nil {
			return nil, fmt.Errorf("%w: prefix: %w", ErrURL, err)
		}
		prefix += "/"
	}
	endpoint, err := url.Parse(o.endpoint())
	if err != nil || endpoint.Scheme != "https" && endpoint.Scheme != "http" || endpoint.Host == "" || strings.Trim(endpoint.Path, "/") != "" {
		return nil, fmt.Errorf("%w: endpoint %q; expected https://HOST[:PORT]", ErrURL, o.endpoint())
	}
	options, err := o.client(endpoint)
	if err != nil {
		return nil, err
	}
	client, err := minio.NewCore(endpoint.Host, options)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrURL, err)
	}
	return &bucket{*client, name, prefix, streamPartBytes}, nil
}

func (o *S3Options) endpoint() string {
	return cmp.Or(o.Endpoint, os.Getenv("AWS_ENDPOINT_URL_S3"), os.Getenv("AWS_ENDPOINT_URL"), awsEndpoint)
}

func (o *S3Options) region() string {
	region := cmp.Or(o.Region, os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION"))
	if region == "" && o.endpoint() != awsEndpoint {
		region = defaultRegion // the library would ask the store, which needs a right of its own
	}
	return region
}

// abortTimeout bounds the removal of an upload that was given up: the target may not answer.
const abortTimeout = 2 * time.Second

// client is the configuration of the client library.
func (o *S3Options) client(endpoint *url.URL) (*minio.Options, error) {
	secure := endpoint.Scheme == "https"
	transport, err := minio.DefaultTransport(secure)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrURL, err)
	}
	if file := cmp.Or(o.CAFile, os.Getenv("AWS_CA_BUNDLE")); file != "" && secure {
		pool, err := authorities(file)
		if err != nil {
			return nil, err
		}
		transport.TLSClientConfig.RootCAs = pool
	}
	return &minio.Options{
		Creds: o.credentials(), Secure: secure, Transport: boundedAnswers{transport}, Region: o.region(),
		MaxRetries: 1, // package objectstore repeats
	}, nil
}

func authorities(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("certificates of the store: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("certificates of the store: %s has no certificate in PEM form", file)
	}
	return pool, nil
}

func (o *S3Options) credentials() *credentials.Credentials {
	if o.AccessKey != "" {
		return credentials.NewStaticV4(o.AccessKey, o.SecretKey, "")
	}
	most := cmp.Or(o.credentialsTime, credentialsTimeout)
	providers := []credentials.Provider{&credentials.EnvAWS{}, newBoundedProvider(&credentials.FileAWSCredentials{}, most)}
	if o.endpoint() == awsEndpoint {
		providers = append(providers, newBoundedProvider(&credentials.IAM{}, most))
	}
	return credentials.NewChainCredentials(providers)
}

func (b *bucket) String() string {
	return "s3://" + b.name + strings.TrimSuffix("/"+b.prefix, "/")
}

func (b *bucket) key(name string) string { return b.prefix + name }

// Create puts an object, unless one has the name. The store decides that, when it has all bytes.
func (b *bucket) Create(ctx context.Context, name string, content Content) (err error) {
	if err := checkName(name); err != nil {
		return err
	}
	r, err := content.Open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if size := content.Size(); size >= 0 && size <= singlePutMax {
		err = b.put(ctx, name, r, size)
	} else {
		err = b.putStream(ctx, name, r)
	}
	return storeError("create", name, err)
}

func (b *bucket) put(ctx context.Context, name string, r io.Reader, size int64) error {
	options := onlyIfAbsent()
	options.DisableMultipart = true
	_, err := b.client.Client.PutObject(ctx, b.name, b.key(name), r, size, options)
	return err
}

// onlyIfAbsent is the condition of every creation.
func onlyIfAbsent() minio.PutObjectOptions {
	options := minio.PutObjectOptions{ContentType: "application/octet-stream"}
	options.SetMatchETagExcept("*")
	return options
}

// putStream uploads an object of unknown size in parts. The library's own upload of this kind does not pass the condition on to
// the request that makes the object.
func (b *bucket) putStream(ctx context.Context, name string, r io.Reader) error {
	part := make([]byte, b.partBytes)
	n, err := io.ReadFull(r, part)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return b.put(ctx, name, &bytesReader{part[:n]}, int64(n))
	}
	if err != nil {
		return err
	}
	id, err := b.client.NewMultipartUpload(ctx, b.name, b.key(name), minio.PutObjectOptions{ContentType: "application/octet-stream"})
	if err != nil {
		return err
	}
	parts, err := b.putParts(ctx, name, id, r, part)
	if err == nil {
		_, err = b.client.CompleteMultipartUpload(ctx, b.name, b.key(name), id, parts, onlyIfAbsent())
	}
	if err != nil {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTimeout)
		defer cancel()
		_ = b.client.AbortMultipartUpload(end, b.name, b.key(name), id) // the store's lifecycle rule removes it otherwise
	}
	return err
}

// putParts uploads the parts of an object, of which the first is in the buffer.
func (b *bucket) putParts(ctx context.Context, name, id string, r io.Reader, part []byte) (parts []minio.CompletePart, err error) {
	for n := len(part); n > 0; {
		number := len(parts) + 1
		put, err := b.client.PutObjectPart(ctx, b.name, b.key(name), id, number, &bytesReader{part[:n]}, int64(n), minio.PutObjectPartOptions{})
		if err != nil {
			return nil, err
		}
		parts = append(parts, minio.CompletePart{PartNumber: number, ETag: put.ETag})
		n, err = io.ReadFull(r, part)
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, err
		}
	}
	return parts, nil
}

// Read gets a range of an object.
func (b *bucket) Read(ctx context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	var options minio.GetObjectOptions
	var err error
	switch {
	case length == 0: // no range is empty
		return b.readNothing(ctx, name, offset)
	case length > 0:
		err = options.SetRange(offset, offset+length-1)
	case offset > 0:
		err = options.SetRange(offset, 0)
	}
	if err != nil {
		return nil, storeError("read", name, err)
	}
	body, info, header, err := b.client.GetObject(ctx, b.name, b.key(name), options)
	if err != nil {
		return nil, storeError("read", name, err)
	}
	size := info.Size
	if size < 0 { // the answer has no Content-Length
		size = rangeSize(header, length)
	}
	switch {
	case length > 0 && size < length:
		return nil, errors.Join(checkRange(name, offset+size, offset, length), body.Close())
	case size < 0: // the answer itself says where it ends
		return &bodyReader{body, name}, nil
	}
	return &exactReader{&bodyReader{body, name}, size}, nil
}

// rangeSize is how many bytes of an object an answer says that it has, or another number if it does not say it.
func rangeSize(answer http.Header, otherwise int64) int64 {
	var first, last int64
	if n, _ := fmt.Sscanf(answer.Get("Content-Range"), "bytes %d-%d", &first, &last); n < 2 {
		return otherwise
	}
	return last - first + 1
}

func (b *bucket) readNothing(ctx context.Context, name string, offset int64) (io.ReadCloser, error) {
	info, err := b.client.StatObject(ctx, b.name, b.key(name), minio.StatObjectOptions{})
	if err != nil {
		return nil, storeError("read", name, err)
	}
	if info.Size < 0 && offset > 0 { // the answer has no Content-Length: the byte before tells
		return b.readNothingAfter(ctx, name, offset-1)
	}
	return &bytesReader{}, checkRange(name, max(info.Size, 0), offset, 0)
}

// readNothingAfter reads nothing after a byte that must be there.
func (b *bucket) readNothingAfter(ctx context.Context, name string, at int64) (io.ReadCloser, error) {
	r, err := b.Read(ctx, name, at, 1)
	if err != nil {
		return nil, err
	}
	_, err = io.Copy(io.Discard, r)
	return &bytesReader{}, errors.Join(err, r.Close())
}

// bodyReader translates the errors of a connection.
type bodyReader struct {
	io.ReadCloser
	name string
}

func (r *bodyReader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = storeError("read", r.name, err)
	}
	return n, err
}

// List lists in pages of a thousand objects.
func (b *bucket) List(ctx context.Context, prefix string, each func(Object) error) error {
	options := minio.ListObjectsOptions{Prefix: b.prefix + prefix, Recursive: true}
	for info := range b.client.ListObjectsIter(ctx, b.name, options) {
		if info.Err != nil {
			return storeError("list", cmp.Or(prefix, b.String()), info.Err)
		}
		name := strings.TrimPrefix(info.Key, b.prefix)
		if checkName(name) != nil {
			continue // another program's
		}
		if err := each(Object{name, info.Size, info.LastModified.Truncate(time.Microsecond)}); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// Delete deletes an object. The protocol reports success if there is none.
func (b *bucket) Delete(ctx context.Context, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	err := storeError("delete", name, b.client.RemoveObject(ctx, b.name, b.key(name), minio.RemoveObjectOptions{}))
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	return err
}

// deniedCodes are answers to wrong credentials with another status than 401 and 403: those of AWS to a token of a session, and that of Versity's
// store to an access key that it does not know.
var deniedCodes = []string{"ExpiredToken", "InvalidToken", "XAdminUserNotFound"}

// storeError translates an error of the client library.
func storeError(operation, name string, err error) error {
	if err == nil {
		return nil
	}
	answer, answered := errors.AsType[minio.ErrorResponse](err)
	if !answered {
		return connectionError(operation, name, err)
	}
	var kind error
	switch status := answer.StatusCode; {
	case answer.Code == minio.NoSuchBucket:
	case answer.Code == minio.PreconditionFailed || status == http.StatusPreconditionFailed:
		kind = ErrExists
	case answer.Code == minio.NoSuchKey: // and not each 404: the library says this of an answer without a body, too
		kind = ErrNotFound
	case answer.Code == "InvalidRange" || status == http.StatusRequestedRangeNotSatisfiable:
		kind = ErrShort
	case status == http.StatusForbidden || status == http.StatusUnauthorized || slices.Contains(deniedCodes, answer.Code):
		kind = ErrDenied
	case status >= 500 || status == http.StatusTooManyRequests || status == http.StatusRequestTimeout || status == http.StatusConflict,
		answer.Code == "RequestTimeout" || answer.Code == "SlowDown": // 409 is a conditional request beside another one
		kind = errTemporary
	}
	if kind == nil {
		return fmt.Errorf("%s %s: %s: %w", operation, name, answer.Code, err)
	}
	return fmt.Errorf("%s %s: %w: %s: %w", operation, name, kind, answer.Code, err)
}

// connectionError classifies what is no answer of the store: a broken connection may be better later, a certificate that is
// refused will not.
func connectionError(operation, name string, err error) error {
	var unknown x509.UnknownAuthorityError
	var hostname x509.HostnameError
	var invalid x509.CertificateInvalidError
	argument := minio.ErrorResponse{}
	if errors.As(err, &unknown) || errors.As(err, &hostname) || errors.As(err, &invalid) || errors.As(err, &argument) || errors.Is(err, context.Canceled) {
		return fmt.Errorf("%s %s: %w", operation, name, err)
	}
	return fmt.Errorf("%s %s: %w: %w", operation, name, errTemporary, err)
}
