// The JDK's own client, java.net.http, as it is by default: what came of its calls, as JSON.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.Stream;

public class JavaCalls {
    static final String MESSAGES = "\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]";

    static HttpRequest chat(String base, String more) {
        String body = "{\"model\": \"chat\", " + MESSAGES + ", \"max_tokens\": 3" + more + "}";
        return HttpRequest.newBuilder(URI.create(base + "/chat/completions"))
            .header("Content-Type", "application/json")
            .POST(BodyPublishers.ofString(body))
            .build();
    }

    static String said(HttpResponse<?> answer, String body) {
        return String.format(
            "{\"version\": \"%s\", \"status\": %d, \"body\": %s}",
            answer.version(), answer.statusCode(), body);
    }

    public static void main(String[] arguments) throws Exception {
        String base = arguments[0];
        // By default it offers HTTP/2 with the first request of each connection.
        for (HttpClient.Version version : HttpClient.Version.values()) {
            HttpClient client = HttpClient.newBuilder().version(version).build();
            List<String> found = new ArrayList<>();
            for (int call = 0; call < 2; call++) {
                HttpResponse<String> whole =
                    client.send(chat(base, ""), BodyHandlers.ofString());
                found.add(said(whole, whole.body()));
            }
            HttpResponse<Stream<String>> stream =
                client.send(chat(base, ", \"stream\": true"), BodyHandlers.ofLines());
            List<String> chunks = new ArrayList<>();
            stream.body()
                .filter(line -> line.startsWith("data: "))
                .map(line -> line.substring("data: ".length()))
                .map(data -> data.equals("[DONE]") ? "\"" + data + "\"" : data)
                .forEach(chunks::add);
            found.add(said(stream, "[" + String.join(", ", chunks) + "]"));
            HttpResponse<String> wrong =
                client.send(chat(base, ", \"n\": 1000"), BodyHandlers.ofString());
            found.add(said(wrong, wrong.body()));
            System.out.println("[" + String.join(", ", found) + "]");
        }
    }
}
