package console

import (
	"encoding/json"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// caller answers calls, and notes them.
type caller struct {
	calls  []string
	header string // authorization of the last call
	answer string
	err    error
}

func (c *caller) call(r *http.Request, method string, _ []byte) ([]byte, error) {
	c.calls, c.header = append(c.calls, method), Authorization(r)
	return []byte(c.answer), c.err
}

func newHandler(adjust func(*Options)) (http.Handler, *caller) {
	c := &caller{answer: "{}"}
	o := Options{Call: c.call, Checked: func() bool { return false }, Samples: NewSamples(func() Counters { return Counters{} })}
	if adjust != nil {
		adjust(&o)
	}
	return Handler(o), c
}

func send(h http.Handler, method, path, body string, headers ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, "http://127.0.0.1:7401"+path, strings.NewReader(body))
	r.Header.Set(fromConsole, "1")
	for i := 0; i < len(headers); i += 2 {
		if headers[i] == "Host" {
			r.Host = headers[i+1]
		} else {
			r.Header.Set(headers[i], headers[i+1])
		}
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

const status = Root + "api/call/epochkv.v1.AdminService/Status"

func TestOnlyPagesOfTheConsoleReachTheAPI(t *testing.T) {
	users := func(o *Options) { o.Checked = func() bool { return true } }
	for _, c := range []struct {
		what    string
		adjust  func(*Options)
		headers []string
		want    int
	}{
		{"the console's page", nil, nil, http.StatusOK},
		{"the same, as a browser says", nil, []string{"Sec-Fetch-Site", "same-origin"}, http.StatusOK},
		{"a form or a link", nil, []string{fromConsole, ""}, http.StatusForbidden},
		{"a page of another site", nil, []string{"Sec-Fetch-Site", "cross-site"}, http.StatusForbidden},
		{"a page of another host of the same site", nil, []string{"Sec-Fetch-Site", "same-site"}, http.StatusForbidden},
		{"a name that was made to resolve to this server", nil, []string{"Host", "evil.example:7401"}, http.StatusForbidden},
		{"localhost", nil, []string{"Host", "localhost:7401"}, http.StatusOK},
		{"an address of version 6", nil, []string{"Host", "[::1]:7401"}, http.StatusOK},
		{"a name that the server knows", func(o *Options) { o.Hosts = []string{"kv.example"} }, []string{"Host", "kv.example"}, http.StatusOK},
		{"any name while users are checked", users, []string{"Host", "kv.example"}, http.StatusOK},
	} {
		h, api := newHandler(c.adjust)
		for _, path := range []string{status, Root + "api/login", Root + "api/logout"} {
			if w := send(h, "POST", path, `{"token":"x"}`, c.headers...); (w.Code == http.StatusForbidden) != (c.want == http.StatusForbidden) {
				t.Errorf("%s: %s answers %d", c.what, path, w.Code)
			}
		}
		if w := send(h, "GET", Root+"api/samples", "", c.headers...); w.Code != c.want {
			t.Errorf("%s: samples answer %d, want %d", c.what, w.Code, c.want)
		}
		if c.want != http.StatusOK && len(api.calls) > 0 {
			t.Errorf("%s: called %v", c.what, api.calls)
		}
	}
}

func TestOnlyListedMethodsAreCalled(t *testing.T) {
	h, api := newHandler(nil)
	for _, method := range []string{"KVService/Put", "KVService/DeleteRange", "AuthService/CreateToken", "AdminService/ResizeCache", "AuthService/Login"} {
		if w := send(h, "POST", Root+"api/call/epochkv.v1."+method, "{}"); w.Code != http.StatusNotFound {
			t.Errorf("%s: %d", method, w.Code)
		}
	}
	for _, method := range changes {
		if w := send(h, "POST", Root+"api/call/"+method, "{}"); w.Code != http.StatusForbidden || !strings.Contains(w.Body.String(), "--console=full") {
			t.Errorf("%s of a read-only console: %d %s", method, w.Code, w.Body)
		}
	}
	if len(api.calls) > 0 {
		t.Errorf("called %v", api.calls)
	}
	h, api = newHandler(func(o *Options) { o.Changes = true })
	for _, method := range slices.Concat(reads, changes) {
		if w := send(h, "POST", Root+"api/call/"+method, "{}"); w.Code != http.StatusOK {
			t.Errorf("%s: %d %s", method, w.Code, w.Body)
		}
	}
	if !slices.Equal(api.calls, slices.Concat(reads, changes)) {
		t.Errorf("called %v", api.calls)
	}
	if w := send(h, "POST", status, strings.Repeat(" ", messageBytesMax+1)); w.Code != http.StatusBadRequest {
		t.Errorf("a message above the limit: %d", w.Code)
	}
}

func TestPagesOfTheConsoleCallListedMethodsOnly(t *testing.T) {
	scripts, err := fs.Glob(embedded, "assets/*.js")
	if err != nil || len(scripts) < 8 {
		t.Fatal(scripts, err)
	}
	used := map[string]bool{}
	for _, name := range scripts {
		text, err := fs.ReadFile(embedded, name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`['"](\w+Service/\w+)['"]`).FindAllStringSubmatch(string(text), -1) {
			used["epochkv.v1."+m[1]] = true
		}
		for _, m := range regexp.MustCompile(`(?:list|ending)\('(\w+)'`).FindAllStringSubmatch(string(text), -1) {
			used["epochkv.v1.AdminService/"+m[1]] = true
		}
		if strings.Contains(string(text), "http:") || strings.Contains(string(text), "https:") {
			t.Errorf("%s names another host", name)
		}
	}
	for method := range used {
		if !slices.Contains(reads, method) && !slices.Contains(changes, method) {
			t.Errorf("a page calls %s, which is in no list", method)
		}
	}
	for _, method := range slices.Concat(reads, changes) {
		if !used[method] {
			t.Errorf("no page calls %s", method)
		}
	}
}

func TestAssetsRunNothingFromElsewhere(t *testing.T) {
	h, _ := newHandler(nil)
	err := fs.WalkDir(embedded, "assets", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		w := send(h, "GET", Root+strings.TrimPrefix(path, "assets/"), "", fromConsole, "")
		if w.Code != http.StatusOK || w.Header().Get("Content-Security-Policy") != policy || w.Header().Get("Content-Type") == "" {
			t.Errorf("%s: %d %v", path, w.Code, w.Header())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(policy, "unsafe") || strings.Contains(policy, "*") {
		t.Errorf("the policy is too wide: %s", policy)
	}
	if w := send(h, "GET", Root+"../console.go", ""); w.Code == http.StatusOK {
		t.Error("a file outside the assets is served")
	}
}

func TestALoginIsACookieThatOnlyThisServerGets(t *testing.T) {
	h, api := newHandler(func(o *Options) { o.Checked = func() bool { return true } })
	api.answer = `{"token":"ekv_secret","user":"ann"}`
	w := send(h, "POST", Root+"api/login", `{"user":"ann","password":"p"}`)
	cookies := w.Result().Cookies()
	if w.Code != http.StatusOK || len(cookies) != 1 || strings.Contains(w.Body.String(), "ekv_secret") {
		t.Fatalf("%d %s %v", w.Code, w.Body, cookies)
	}
	if c := cookies[0]; !c.HttpOnly || c.SameSite != http.SameSiteStrictMode || c.Path != Root || c.Value != "ekv_secret" || c.Expires.After(time.Now().Add(sessionTime+time.Minute)) {
		t.Errorf("%+v", c)
	}
	send(h, "POST", status, "{}", "Cookie", cookies[0].Name+"="+cookies[0].Value)
	if api.header != "Bearer ekv_secret" {
		t.Errorf("the call has the header %q", api.header)
	}
	api.answer = `{"user":""}` // what WhoAmI says of a token that is not known
	if w := send(h, "POST", Root+"api/login", `{"token":"guess"}`); w.Code != http.StatusUnauthorized || len(w.Result().Cookies()) != 0 {
		t.Errorf("a token that is not known: %d %v", w.Code, w.Result().Cookies())
	}
	api.err = &CallError{Status: http.StatusUnauthorized, Code: "Unauthenticated", Message: "expired"}
	w = send(h, "POST", Root+"api/logout", "{}", "Cookie", "epochkv-console=old")
	if w.Code != http.StatusOK || len(w.Result().Cookies()) != 1 || w.Result().Cookies()[0].Value != "" {
		t.Errorf("a logout with an expired token: %d %v", w.Code, w.Result().Cookies())
	}
	if w := send(h, "GET", Root+"api/samples", ""); w.Code != http.StatusUnauthorized {
		t.Errorf("samples for a caller that may not read Status: %d", w.Code)
	}
}

func TestSamplesAreAnHourOfRates(t *testing.T) {
	var c Counters
	s := NewSamples(func() Counters { return c })
	start := time.Unix(1_000_000, 0)
	for i := range samplesMax + 11 {
		s.take(start.Add(time.Duration(i) * SampleEvery))
		c.Reads += 100
		c.ReadLatency[3] += 99 // below 32.8 us
		c.ReadLatency[10]++    // below 4.2 ms
		c.CacheHits += 3
		c.CacheMisses++
		c.MemoryUsed = uint64(i)
	}
	var all []sample
	if err := json.Unmarshal(s.JSON(), &all); err != nil {
		t.Fatal(err)
	}
	if len(all) != samplesMax {
		t.Fatalf("%d samples, want %d", len(all), samplesMax)
	}
	last := all[len(all)-1]
	if last.Reads != 20 || last.HitRatio != 0.75 || last.MemoryUsed != uint64(samplesMax+9) || last.WriteP99 != 0 {
		t.Errorf("%+v", last)
	}
	if last.ReadP50 < 32e-6 || last.ReadP50 > 33e-6 || last.ReadP99 > 33e-6 {
		t.Errorf("median %v, 99 %% %v, want 32.8 us both: 99 of 100 are below", last.ReadP50, last.ReadP99)
	}
	for i := 1; i < len(all); i++ {
		if all[i].Time-all[i-1].Time != SampleEvery.Milliseconds() {
			t.Fatalf("sample %d is %d ms after the one before", i, all[i].Time-all[i-1].Time)
		}
	}
}

// TestSamplesBecomeJSONOnce: made anew for each request, the same text of 200 KB had the processors of a server to itself.
func TestSamplesBecomeJSONOnce(t *testing.T) {
	s := NewSamples(func() Counters { return Counters{} })
	at := time.Unix(1_000_000, 0)
	for length := range 3 {
		s.take(at.Add(time.Duration(length) * SampleEvery))
		first, second := s.JSON(), s.JSON()
		if &first[0] != &second[0] {
			t.Errorf("%d samples were made JSON twice", length)
		}
		var all []sample
		if err := json.Unmarshal(second, &all); err != nil || len(all) != length {
			t.Errorf("%d samples, want %d: %v", len(all), length, err)
		}
	}
}
