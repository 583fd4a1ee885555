package telemetry

import (
	"context"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// deafScraper takes nothing of its answer until it is told to.
type deafScraper struct {
	httptest.ResponseRecorder
	waits, takes chan struct{}
}

func (d *deafScraper) Write(p []byte) (int, error) {
	select {
	case d.waits <- struct{}{}:
	default:
	}
	<-d.takes
	return len(p), nil
}

// TestScrapersThatReadNothingStopNoOther, however many they are.
func TestScrapersThatReadNothingStopNoOther(t *testing.T) {
	handler, takes := Handler(NewRegistry(testSources()), oneAtATime()), make(chan struct{})
	var all sync.WaitGroup
	defer all.Wait()
	defer close(takes)
	for range 10 {
		deaf := &deafScraper{waits: make(chan struct{}, 1), takes: takes}
		all.Go(func() { handler.ServeHTTP(deaf, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody)) })
		<-deaf.waits
	}
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
	if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "kvserver_build_info") {
		t.Errorf("got %d, %q", w.Code, w.Body.String())
	}
}

// oneAtATime gives turns in the order in which requests came.
func oneAtATime() func(*http.Request) (leave func(), err error) {
	turn := make(chan struct{}, 1)
	return func(r *http.Request) (func(), error) {
		select {
		case turn <- struct{}{}:
			return func() { <-turn }, nil
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
}

// TestScrapesTakeAPartOfAProcessor, however many clients ask without end.
func TestScrapesTakeAPartOfAProcessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const clients, takes, lasts = 20, 2 * time.Millisecond, 2 * time.Second
		sources, scrapes := testSources(), 0
		server := sources.Server
		sources.Server = func() ServerStats {
			scrapes++
			time.Sleep(takes)
			return server()
		}
		handler := Handler(NewRegistry(sources), oneAtATime())
		ctx, cancel := context.WithTimeout(t.Context(), lasts)
		defer cancel()
		answers := make([]int, clients)
		var all sync.WaitGroup
		for i := range clients {
			all.Go(func() {
				for ctx.Err() == nil {
					handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody))
					answers[i]++
				}
			})
		}
		all.Wait()
		if busy := time.Duration(scrapes) * takes; busy > lasts/scrapePause || busy < lasts/(scrapePause+2) {
			t.Errorf("scrapes took %v of %v", busy, lasts)
		}
		if least := slices.Min(answers); least < scrapes/clients/2 {
			t.Errorf("of %d scrapes, a client of %d had %d", scrapes, clients, least)
		}
	})
}

// TestScrapesHaveATimeout: counters that cannot be read, because a device does not answer, hold up few goroutines.
func TestScrapesHaveATimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sources, stuck := testSources(), make(chan struct{})
		server := sources.Server
		sources.Server = func() ServerStats {
			<-stuck
			return server()
		}
		handler := Handler(NewRegistry(sources), oneAtATime())
		codes := make(chan int)
		scrape := func(ctx context.Context) {
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/metrics", http.NoBody))
			codes <- w.Code
		}
		for range 8 {
			go scrape(t.Context())
		}
		for range 8 {
			if code := <-codes; code != http.StatusServiceUnavailable {
				t.Errorf("got %d", code)
			}
		}
		close(stuck)
		synctest.Wait()
		go scrape(t.Context())
		if code := <-codes; code != http.StatusOK {
			t.Errorf("got %d once the device answers", code)
		}
	})
}
