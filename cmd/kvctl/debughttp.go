package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// bundlePartBytesMax bounds an answer of the HTTP port.
const bundlePartBytesMax = 256 << 20

// httpNone is the --http that leaves out the parts from there.
const httpNone = "none"

// bundleSource is the HTTP port of a server.
type bundleSource struct {
	base   string // without a slash at its end
	client *http.Client
	token  string
}

// bundleHTTP finds the HTTP port, or says why there is none to ask. No part comes from there for --http none.
func (a *app) bundleHTTP(ctx context.Context, c *client.Client, base string) (*bundleSource, error) {
	if base == httpNone {
		return nil, nil //nolint:nilnil // neither a source nor a reason: these parts are not wanted
	}
	s := &bundleSource{client: &http.Client{
		// A token is for this server only.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	if base == "" {
		ctx, cancel := context.WithTimeout(ctx, a.timeout)
		defer cancel()
		options, err := c.Config(ctx)
		if err != nil {
			return s, fmt.Errorf("the address of the HTTP port is not known: %w", err)
		}
		if base, err = deriveHTTP(a.endpoint, options); err != nil {
			return s, err
		}
	}
	at, err := url.Parse(base)
	if err != nil || at.Host == "" || at.Scheme != "http" && at.Scheme != "https" {
		return s, fmt.Errorf("--http %q: expected a URL such as http://db1:7401", base)
	}
	files := client.TLSFiles{CA: a.tls.CA, Cert: a.tls.Cert, Key: a.tls.Key, ServerName: a.tls.ServerName}
	config, err := files.Config()
	if err != nil {
		return s, err
	}
	s.client.Transport = &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}
	if s.token, err = a.httpToken(); err != nil {
		return s, err
	}
	if s.token != "" && at.Scheme == "http" && !isLoopback(at.Hostname()) {
		return s, errors.New("tokens are not sent in plain text to another machine: use https")
	}
	s.base = strings.TrimSuffix(base, "/")
	return s, nil
}

// httpToken is the token that says which user kvctl is, if it has one.
func (a *app) httpToken() (string, error) {
	if a.tls.TokenFile == "" {
		return a.tls.Token, nil
	}
	text, err := os.ReadFile(a.tls.TokenFile)
	return strings.TrimSpace(string(text)), err
}

func isLoopback(host string) bool { return host == "localhost" || net.ParseIP(host).IsLoopback() }

// deriveHTTP is the URL of the HTTP port of the server at endpoint, from its options.
func deriveHTTP(endpoint string, options []*kvpb.ConfigOption) (string, error) {
	address, scheme := "", "http"
	for _, o := range options {
		switch {
		case o.GetName() == "http":
			address = o.GetValue()
		case o.GetName() == "tls-cert" && o.GetValue() != "":
			scheme = "https"
		}
	}
	if address == "" {
		return "", errors.New("the server has no HTTP port")
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil || port == "0" {
		return "", fmt.Errorf("the address of the HTTP port is not known from its option, %q; name it with --http", address)
	}
	reached, _, err := net.SplitHostPort(endpoint)
	if err != nil || strings.ContainsRune(endpoint, '/') { // a socket, or a name for a resolver
		return "", fmt.Errorf("the endpoint %s has no host to ask for HTTP; name it with --http", endpoint)
	}
	switch ip := net.ParseIP(host); {
	case host == "" || ip.IsUnspecified():
		host = reached
	case isLoopback(host) && !isLoopback(reached):
		return "", fmt.Errorf("the HTTP port, %s, is on loopback of the server's machine: run this command there", address)
	}
	return scheme + "://" + net.JoinHostPort(host, port), nil
}

// parts are the parts from the HTTP port; missing is the reason if they cannot be had.
func (s *bundleSource) parts(missing error, cpu time.Duration) []*bundlePart {
	if s == nil {
		return nil
	}
	part := func(name, path, about string) *bundlePart {
		return &bundlePart{name: name, about: about, collect: func(ctx context.Context) ([]byte, error) {
			if missing != nil {
				return nil, missing
			}
			return s.get(ctx, path)
		}}
	}
	all := []*bundlePart{
		part("metrics.txt", "/metrics", "the metrics, in the format of Prometheus"),
		part("goroutines.txt", "/debug/pprof/goroutine?debug=1", "what the server's goroutines do: stacks, without their arguments"),
		part("heap.pprof", "/debug/pprof/heap", "what allocated the Go heap: read it with go tool pprof"),
	}
	if cpu > 0 {
		profile := part("cpu.pprof", fmt.Sprintf("/debug/pprof/profile?seconds=%.0f", max(1, cpu.Seconds())), "what takes processor time: read it with go tool pprof")
		profile.timeout = cpu
		all = append(all, profile)
	}
	return all
}

func (s *bundleSource) get(ctx context.Context, path string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.base+path, nil)
	if err != nil {
		return nil, err
	}
	if s.token != "" {
		r.Header.Set("Authorization", "Bearer "+s.token)
	}
	answer, err := s.client.Do(r)
	if err != nil {
		return nil, err
	}
	defer func() { _ = answer.Body.Close() }() // only read
	content, err := io.ReadAll(io.LimitReader(answer.Body, bundlePartBytesMax+1))
	switch {
	case err != nil:
		return nil, err
	case answer.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("GET %s: %s", path, answer.Status)
	case len(content) > bundlePartBytesMax:
		return nil, fmt.Errorf("GET %s: longer than %s", path, size(bundlePartBytesMax))
	}
	return content, nil
}
