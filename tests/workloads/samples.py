"""A few lines of every public format, made up in its shape."""

AZURE_FUNCTIONS_2019 = """\
HashOwner,HashApp,HashFunction,Trigger,1,2,3
o1,a1,f1,http,2,0,1
o1,a1,f2,timer,0,0,0
o2,a2,f1,queue,0,3,0
"""
AZURE_FUNCTIONS_2021 = """\
app,func,end_timestamp,duration
a1,f1,5.25,0.25
a1,f2,4.5,1.5
a2,f1,1.0,2.0
a1,f1,61.0,0.5
"""
AZURE_LLM_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:50.9951695,7,0
"""
AZURE_LLM_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 23:59:59.500000+00:00,2162,5
2024-05-13 00:00:00+00:00,2399,6
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,Conversation log
1106,ChatGPT,0,0,0,Conversation log
1129,ChatGPT,1305,477,1782,API log
"""
BURSTGPT_SESSIONS = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log
19440161.5,d5983bf9,2,ChatGPT,36,29,65,API log
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 7319, "output_length": 490, "hash_ids": [0, 14]}

{"timestamp": 3000, "input_length": 12, "output_length": 3}
"""
PLAIN = """\
t_s,function,input_tokens,output_tokens
0.125,0,396,112
0.25,3,1056,430
1.5,3,1112,395
"""
REPLAY_RECORD = """\
t_s,function,input_tokens,output_tokens,deployment,late_ms,end,tokens,ttft_s,tpot_s,whole_s,\
grace_s,met,met_in_the_mean
2.5,a1/f1,396,112,chat,0.4,length,112,0.31,0.02,2.51,0.0,1,1
0.25,a2/f1,1056,430,code,0.2,queue_full,0,,,0.01,0.0,0,0
"""
